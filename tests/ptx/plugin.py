"""``python -m pytest -p tests.ptx.plugin tests/kernels``: tests with each launch replaced by its PTX."""

import pytest

from tests.ptx.emulator import Emulator, install

EMULATOR = Emulator()
install(EMULATOR)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--capability", type=int, default=80, help="of the device that kernels are compiled for")
    parser.addoption("--schedules", type=int, default=2, help="random schedules of each launch")
    parser.addoption("--schedule-seed", type=int, default=0, help="another seed gives other schedules")


def pytest_configure(config: pytest.Config) -> None:
    EMULATOR.capability, EMULATOR.schedules = config.getoption("capability"), config.getoption("schedules")
    EMULATOR.seed = config.getoption("schedule_seed")


@pytest.fixture(autouse=True)
def nothing_found(request: pytest.FixtureRequest):
    """A test fails if something was found in its launches."""
    EMULATOR.label, before = request.node.name, len(EMULATOR.found)
    yield
    assert len(EMULATOR.found) == before, "the emulator has new findings"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line("\n".join(EMULATOR.summary()))
