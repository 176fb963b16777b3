"""An unusable output folder is rejected before any work, with its option and the reason."""

import os
import re

import pytest

from shardproof.report.out_path import check_folder, check_writable, write_text, write_texts


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


def rejection(inputs=None, /, **paths):
    with pytest.raises(ValueError) as caught:
        check_writable(inputs, **{option: str(path) for option, path in paths.items()})
    return str(caught.value)


def test_pipes_loops_and_source_files_are_rejected(tmp_path):
    pipe, loop, source = tmp_path / "pipe.xml", tmp_path / "loop.xml", tmp_path / "my_scheme.py"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    source.write_text("x = 1")
    assert rejection(junit=pipe) == f"--junit {pipe}: is a named pipe; give a file, or - for standard output"
    assert rejection(junit=loop) == f"--junit {loop}: is a loop of symbolic links; give another path"
    assert rejection(out=source) == f"--out {source}: is a Python file, which would be replaced; give another path"
    check_writable(out=str(tmp_path / "new.py"), junit="/dev/null")


def test_two_options_with_one_file_are_rejected(tmp_path):
    file = tmp_path / "out.json"
    assert rejection(json=file, junit=file) == f"--json and --junit are both {file}; give each a file of its own"
    check_writable(json=str(file), junit=str(tmp_path / "out.xml"), html="-")


def test_an_output_that_is_an_input_is_rejected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "known.txt").touch()
    (tmp_path / "link.txt").symlink_to("known.txt")
    for path in (tmp_path / "known.txt", "./known.txt", "link.txt"):
        sentence = f"--junit and --expected-failures are both {path}; give each a file of its own"
        assert rejection({"--expected-failures": "known.txt"}, junit=path) == sentence
    check_writable({"--expected-failures": "known.txt", "--links": None}, junit="out.xml")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "out.json"
    write_text(str(file), "first \ud800")
    file.chmod(0o640)
    write_text(str(file), "second")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("second\n", 0o640)
    link = tmp_path / "link.json"
    link.symlink_to(file)
    write_text(str(link), "third")
    assert link.is_symlink() and file.read_text() == "third\n"

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_text(str(file), "fourth")
    assert (caught.value.filename, file.read_text()) == (str(file), "third\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "out.json"]


def test_the_other_files_are_written_if_one_cannot_be(tmp_path):
    missing, there = tmp_path / "missing" / "out.json", tmp_path / "out.xml"
    with pytest.raises(OSError, match="No such file"):
        write_texts({str(missing): lambda: "lost", str(there): lambda: "kept"})
    assert there.read_text() == "kept\n"
