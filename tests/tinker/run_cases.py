"""The cases of Tinker's clients and their environment."""

from pathlib import Path

import case_files

TESTS = Path(__file__).resolve().parents[1]
CASES = Path(__file__).with_name("cases")


def run_cases(files: list[Path], bough_program: Path, folder: Path, timeout: float) -> dict[str, list[str]]:
    """The failures of each test, by the test's name."""
    case_files.set_up("tinker")
    variables = {
        "BOUGH_PROGRAM": str(bough_program),
        "PYTHONPATH": ":".join(map(str, [CASES, TESTS, TESTS / "serve", TESTS / "parity"])),
        "TINKER_API_KEY": "tml-dummy",
        "TINKER_TELEMETRY": "0",
    }
    return case_files.run_cases(
        "tinker", files, folder, fixtures="tinker_fixtures", variables=variables, timeout=timeout
    )
