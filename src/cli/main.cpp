#include <cstdio>
int main() { std::printf("bough 0.1.0\n"); }
