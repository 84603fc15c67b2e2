"""Trackers of a run (``--track``): Weights & Biases, and event files for TensorBoard. Neither ever stops a run."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from runtime.system.process import print_on_rank_0

COLUMNS = ("prompt", "response", "truth", "reward", "advantage")  # of a table of samples: rows in a list


class Wandb:
    """A run of Weights & Biases: numbers, and lists of rows as tables."""

    def __init__(self, run: Any):
        self.run = run
        self.finish = run.finish

    def log(self, values: dict[str, Any], step: int) -> None:
        """Log the values of a step."""
        import wandb

        tables = {}
        for name, value in values.items():
            if isinstance(value, list):
                tables[name] = wandb.Table(list(COLUMNS), value)
        self.run.log(values | tables, step=step)


def start_wandb(folder: Path, config: dict[str, Any]) -> Wandb | None:
    """Start the wandb run ``config["wandb_id"]``: offline if there is no network, or None if that fails as well."""
    import wandb

    if "weave" not in sys.modules:  # wandb would advertise it, because vLLM imports openai
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
    options = {"project": os.environ.get("WANDB_PROJECT", "exactrl"), "name": folder.name[:128]}
    options |= {"config": config, "dir": str(folder), "id": config["wandb_id"], "resume": "allow"}
    # wandb writes down the command line and the address of the git remote, either of which may hold a secret. The
    # commit is in config. It would also ask a terminal for a key, and wait for the answer.
    words, keyboard = sys.argv, sys.stdin
    for mode, limits in ((None, {"init_timeout": 20, "finish_timeout": 30}), ("offline", {})):
        try:
            sys.argv = config["command"]
            settings = wandb.Settings(silent=True, disable_git=True, **limits)
            with open(os.devnull) as sys.stdin:
                return Wandb(wandb.init(**options, mode=mode, settings=settings))
        except Exception as error:  # no network, no key, a server error
            reason = (str(error) or type(error).__name__).splitlines()[0]
            instead = "no tracking" if mode else f"tracking offline in {folder}"
            print_on_rank_0(f"warning: wandb is not reachable ({reason}); {instead}")
        finally:
            sys.argv, sys.stdin = words, keyboard


def text_table(rows: list[list]) -> dict[str, Any]:
    """Return the content of a summary that the text plugin shows as a table: a tensor of texts with two dimensions."""
    cells = []
    for row in (COLUMNS, *rows):
        for cell in row:
            cells.append(str(cell).encode())
    shape = {"dim": [{"size": len(rows) + 1}, {"size": len(COLUMNS)}]}
    return {
        "metadata": {"plugin_data": {"plugin_name": "text"}},
        "tensor": {"dtype": "DT_STRING", "string_val": cells, "tensor_shape": shape},
    }


class TensorBoard:
    """Event files of a run: the numbers of metrics.jsonl and eval.jsonl under their names, as fp32, and samples."""

    def __init__(self, folder: Path, first: int):
        """``first``: the first step that follows. TensorBoard drops what earlier event files have from there on."""
        from tensorboardX.event_file_writer import EventsWriter  # writes at once; its SummaryWriter has a thread
        from tensorboardX.proto.event_pb2 import Event

        (folder / "tensorboard").mkdir(exist_ok=True)
        self.event = Event
        self.writer = EventsWriter(str(folder / "tensorboard" / "events"), f".{time.time_ns()}")
        self.finish = self.writer.close
        self._write(first, session_log={"status": "START"})

    def _write(self, step: int, **content: Any) -> None:
        event = self.event(wall_time=time.time(), step=step, **content)
        self.writer.write_event(event)
        self.writer.flush()

    def log(self, numbers: dict[str, Any], step: int) -> None:
        """Write the numbers of a step, and lists of rows as tables of the text plugin; nothing else that it holds."""
        values = []
        for name, value in numbers.items():
            if isinstance(value, int | float):
                values.append({"tag": name, "simple_value": value})
            if isinstance(value, list):
                values.append({"tag": name, **text_table(value)})
        self._write(step, summary={"value": values})
