"""Objects by name: of the project's own modules, and of users' files."""

import sys
import types

import pytest

from runtime.system import user_files


def test_find_returns_an_object_of_the_project_or_of_a_users_file(tmp_path):
    (tmp_path / "my.game.py").write_text("class Guess:\n    pass\n")
    assert user_files.find("runtime.system.user_files:find") is user_files.find
    found = user_files.find(f"{tmp_path}/my.game.py:Guess")
    assert found.__name__ == "Guess"
    assert user_files.find(f"{tmp_path}/my.game.py:Guess") is found  # the file is run once
    with pytest.raises(AttributeError, match="Chess"):
        user_files.find(f"{tmp_path}/my.game.py:Chess")
    with pytest.raises(AttributeError, match="lost"):
        user_files.find("runtime.system.user_files:lost")
    with pytest.raises(ModuleNotFoundError, match=r"runtime\.system\.nothing"):
        user_files.find("runtime.system.nothing:find")


def test_a_module_that_imports_what_is_absent_when_it_is_asked(tmp_path, monkeypatch):
    """As transformers' aliases of image processors do: a file that imports the library loads without torchvision."""

    def asked(name: str):
        raise ModuleNotFoundError("No module named 'torchvision'")

    (tmp_path / "lazy.py").write_text("import sys\n\nsys.modules['alias'] = sys.modules['waiting']\nscore = 1\n")
    waiting = types.ModuleType("waiting")
    waiting.__getattr__ = asked
    monkeypatch.setitem(sys.modules, "waiting", waiting)
    monkeypatch.delitem(sys.modules, "alias", raising=False)
    assert user_files.find(f"{tmp_path}/lazy.py:score") == 1
