from bough import main

main()
