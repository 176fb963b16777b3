"""An unusable output folder is rejected before any work, with its option and the reason."""

import os
import re

import pytest

from shardproof.report.out_path import check_folder


def test_a_folder_that_can_be_created_is_not_rejected(tmp_path):
    check_folder(checkpoint=None)
    check_folder(checkpoint=str(tmp_path))
    check_folder(checkpoint=str(tmp_path / "new" / "below"))
    assert not (tmp_path / "new").exists()


def test_a_folder_below_a_file_is_rejected(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for path, sentence in {
        file: f"--jax-cache '{file}' is a file; give a folder",
        file / "below": f"--jax-cache {file / 'below'}: {file} is a file; give another folder",
    }.items():
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            check_folder(jax_cache=str(path))


def test_a_folder_that_may_not_be_written_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    sentence = f"--checkpoint {tmp_path / 'new'}: {tmp_path} may not be written; give another folder"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        check_folder(checkpoint=str(tmp_path / "new"))
