"""Runs the tests of this folder in a sandbox, where two machines can be made."""

import sys

from tests.multihost.namespaces import enter

LIMITS = ["--timeout=900", "-o", "faulthandler_timeout=890"]  # each starts two machines

if __name__ == "__main__":
    enter([sys.executable, "-m", "pytest", "tests/multihost", *LIMITS, *sys.argv[1:]])
