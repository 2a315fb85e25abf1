"""Runs a notebook as a user does, the button that interrupts a cell included.

``python -m tests.support.notebooks NOTEBOOK`` runs it and keeps what it prints and draws in it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient

_TIMEOUT = 280  # seconds for a cell, on a busy machine


class Reader(NotebookClient):
    """Runs the cells in order, and interrupts one with the tag ``interrupt`` once it prints."""

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        """Handle what the kernel sent; nbclient calls this for each message."""
        printed = msg["msg_type"] == "stream" and msg["content"]["name"] == "stdout"
        if printed and "interrupt" in cell.metadata.get("tags", []):
            manager: Any = self.km
            os.kill(manager.provisioner.pid, signal.SIGINT)  # as the button does
        return super().process_message(msg, cell, cell_index)


def executed(path: Path, folder: Path) -> Any:
    """The notebook as it is after a run in ``folder``.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell raises that is not marked to.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    Reader(notebook, timeout=_TIMEOUT, resources=resources, record_timing=False).execute()
    return notebook


if __name__ == "__main__":
    where = Path(sys.argv[1])
    with TemporaryDirectory() as there:
        notebook = executed(where, Path(there))
    for cell in notebook.cells:
        if cell.cell_type == "code":  # without warnings, which have paths of this machine
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    nbformat.write(notebook, where)
