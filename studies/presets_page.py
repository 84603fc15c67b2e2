"""Write docs/evidence/presets.md from the table in runtime/presets.py.

python studies/presets_page.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

from runtime import presets

if __name__ == "__main__":
    Path(__file__).resolve().parent.parent.joinpath("docs", "evidence", "presets.md").write_text(presets.page())
