"""Objects by name: of the project's own modules, and of users' files."""

import sys

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


def test_a_module_that_imports_what_is_absent_when_it_is_asked(tmp_path):
    """As transformers' aliases of image processors do: a file that imports the library loads without torchvision."""
    text = "import sys, types\n\nalias = sys.modules['alias'] = types.ModuleType('alias')\n"
    (tmp_path / "a.py").write_text(f"{text}alias.__getattr__ = lambda name: __import__('absent')\n")
    assert user_files.find(f"{tmp_path}/a.py:alias") is sys.modules.pop("alias")
