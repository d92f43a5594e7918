"""`script`: scripts/NAME.py as a module, for the tests of test_NAME.py."""

import importlib.util
import sys

import pytest


@pytest.fixture(scope="module")
def script(request, repo):
    name = request.module.__name__.rpartition(".")[2].removeprefix("test_")
    spec = importlib.util.spec_from_file_location(name, repo / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
