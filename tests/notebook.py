"""Write the code of variants/grpo_min.py into notebooks/quickstart.ipynb: python tests/notebook.py

The id of a cell is the first function or class that it has. The text between the cells is edited in the notebook.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "variants" / "grpo_min.py"
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"
OTHER = {  # id of a cell that begins with something else -> its beginning
    "imports": "import argparse\n",
    "arguments": 'if __name__ == "__main__":  # here, so that --help does not wait for the slow imports\n',
    "libraries": "import torch\n",
    "train": 'if __name__ == "__main__":\n    main(args)\n',
}
# A kernel has no command line of its own.
IN_A_KERNEL = {"arguments": 'args = parse_args(["--steps", "20"])', "train": "main(args)"}
INSTALL = """import os
import shutil
import subprocess
import sys

packages = {}
if not shutil.which("nvidia-smi"):
    packages.pop()  # vLLM needs a GPU
subprocess.run([sys.executable, "-m", "pip", "install", "-q", *packages], check=True)
if os.path.isdir("../models"):  # in a clone: its model, and its folder for runs
    os.chdir("..")"""


def code_of(names: list[str]) -> dict[str, str]:
    """Return the code of the cells with these ids, which are all of the file but its docstring."""
    text = FILE.read_text()
    packages = re.findall(r'"(\w+==[\d.]+)', text.partition('"""')[0])
    beginnings = [OTHER.get(name) or (f"class {name}:" if name[0].isupper() else f"def {name}(") for name in names]
    places = [text.index(f"\n{beginning}") for beginning in beginnings]
    assert places == sorted(places) and text.index('"""\n\nimport') + 4 == places[0]
    cells = zip(names, places, [*places[1:], len(text)], strict=True)
    found = {name: text[start:end].strip() for name, start, end in cells}
    return found | IN_A_KERNEL | {"install": INSTALL.format(json.dumps(packages))}


def refreshed() -> str:
    """Return the notebook with today's code."""
    content = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    code = code_of([cell["id"] for cell in cells[1:]])
    for cell in cells:
        cell["source"] = code[cell["id"]].splitlines(keepends=True)
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(refreshed())
