"""Execute notebooks in fresh kernels and save them with their outputs.

    python notebooks/execute.py            # all of them
    python notebooks/execute.py 01_quickstart.ipynb

What is saved is the same whoever runs it: no timings, no names of kernels.
"""

import pathlib
import sys
import tempfile

import nbformat
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).parent


def execute(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)
    with tempfile.TemporaryDirectory() as elsewhere:
        NotebookClient(
            notebook,
            timeout=600,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": elsewhere}},
        ).execute()
    notebook.metadata.clear()
    notebook.metadata.update(metadata)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    names = sys.argv[1:] or sorted(path.name for path in FOLDER.glob("*.ipynb"))
    for name in names:
        execute(FOLDER / name)
        print(f"executed {name}")
