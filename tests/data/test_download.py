"""Downloads from a loopback server that is slow, torn, wrong or gone: right bytes or no file."""

import itertools
import os
import random
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

import samestep.core.data.download as downloading
from samestep.base.errors import UserError
from samestep.core.data import catalog
from samestep.core.data.download import download
from tests.data.loopback import Answer, Mirror, data_set, listed, md5, names_in
from tests.processes import start_ranks

FILES = {name: random.Random(name).randbytes(20_000) for name in ("one.gz", "two.gz")}
ONE, HALF = FILES["one.gz"], 10_000
WRONG = bytes(20_000)


LISTED = [listed(*named) for named in FILES.items()]
CATALOG = {"both": data_set("both", *LISTED), "one": data_set("one", LISTED[0])}


@pytest.fixture(autouse=True)
def small_catalog(monkeypatch):
    monkeypatch.setattr(catalog, "CATALOG", CATALOG)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def get_one(folder, *mirrors, timeout_s=60.0):
    urls = [getattr(mirror, "url", mirror) for mirror in mirrors]
    return download("one", folder, mirrors=urls, timeout_s=timeout_s)


def failure(folder, *mirrors, timeout_s=5.0):
    """Return the message; whatever went wrong, there is no file under the final name."""
    with pytest.raises(UserError) as caught:
        get_one(folder, *mirrors, timeout_s=timeout_s)
    assert not (folder / "one.gz").exists()
    return str(caught.value)


def test_all_files_arrive_in_a_new_folder_and_nothing_else_is_left(tmp_path, capfd):
    with Mirror(FILES) as mirror:
        paths = download("both", tmp_path / "new" / "folder", mirrors=[mirror.url.rstrip("/")])
    assert [path.read_bytes() for path in paths] == list(FILES.values())
    assert names_in(tmp_path / "new" / "folder") == ["one.gz", "two.gz"]
    assert capfd.readouterr() == ("", ""), "no bar without a terminal"


def test_a_slow_mirror_may_take_longer_than_the_timeout_while_bytes_come(tmp_path):
    with Mirror(FILES, Answer(piece_bytes=2_500, pause_s=0.2)) as mirror:
        get_one(tmp_path, mirror, timeout_s=1.2)
    assert (tmp_path / "one.gz").read_bytes() == ONE
    assert len(mirror.asked) == 1


@pytest.mark.parametrize("stop_after", [0, HALF])
def test_a_mirror_that_stalls_is_given_up_after_the_timeout(tmp_path, stop_after):
    answers = [Answer(stop_after=num_bytes, stalls=True) for num_bytes in (stop_after, 0)]
    with Mirror(FILES, *answers) as mirror:
        message = failure(tmp_path, mirror, timeout_s=0.3)
    assert f"{mirror.url}one.gz: " in message
    assert "0.3 s" in message


PACKED = Answer(headers=(("Content-Encoding", "gzip"),))
ELSEWHERE = Answer(content_range="bytes 5-19999/20000")
CUT, UNSAID = Answer(stop_after=6_000), Answer(stop_after=HALF, says_length=False)
PART = {"one.gz.part": ONE[:HALF]}
WAYS = {  # what is there, what the server does, and from where it is asked for how much
    "nothing": ({}, (), [(None, 20_000)]),
    "a file of other bytes": ({"one.gz": WRONG}, (), [(None, 20_000)]),
    "cut, without a length": ({}, (UNSAID, Answer()), [(None, HALF), (HALF, HALF)]),
    "cut again": ({}, (CUT,), [(None, 6000), (6000, 6000), (12_000, 6000), (18_000, 2000)]),
    "a part": (PART, (), [(HALF, HALF)]),
    "a part, complete": ({"one.gz.part": ONE}, (), []),
    "a part, no ranges": (PART, (Answer(knows_range=False),), [(HALF, 20_000)]),
    "a part of other bytes": ({"one.gz.part": WRONG[:HALF]}, (), [(HALF, HALF), (None, 20_000)]),
    "a part too long": ({"one.gz.part": ONE + b"more"}, (), [(20_004, 0), (None, 20_000)]),
    "continued from elsewhere": (PART, (ELSEWHERE, Answer()), [(HALF, None), (None, 20_000)]),
    # Some servers call a .gz file gzip-encoded text; unpacking it would change the hash.
    "bytes as they lie": ({}, (PACKED,), [(None, 20_000)]),
}


@pytest.mark.parametrize(("there", "answers", "asked"), WAYS.values(), ids=WAYS)
def test_whatever_is_there_the_right_bytes_arrive(tmp_path, there, answers, asked):
    for name, content in there.items():
        (tmp_path / name).write_bytes(content)
    with Mirror(FILES, *answers) as mirror:
        get_one(tmp_path, mirror)
    assert [each.start for each in mirror.asked] == [start for start, _ in asked]
    for each, (_, num_sent) in zip(mirror.asked, asked, strict=True):
        assert num_sent in (each.num_sent, None)
        assert each.encoding == "identity"
    assert names_in(tmp_path) == ["one.gz"]
    assert (tmp_path / "one.gz").read_bytes() == ONE


def test_where_nothing_right_came_it_is_told_and_no_file_or_new_folder_is_left(tmp_path):
    (tmp_path / "there").mkdir()
    for answer, told in (
        (Answer(status=503), ("503",)),
        (Answer(body=WRONG), (md5(WRONG), md5(ONE))),
    ):
        with Mirror(FILES, answer) as mirror:
            messages = [failure(tmp_path / place, mirror) for place in ("new/folder", "there")]
        for message, part in itertools.product(messages, (f"{mirror.url}one.gz: ", *told)):
            assert part in message
        assert names_in(tmp_path) == ["there"]
        assert names_in(tmp_path / "there") == []


def test_mirrors_take_over_and_when_all_fail_each_is_named(tmp_path):
    torn, gone = Answer(stop_after=HALF), Answer(status=503)
    with Mirror(FILES, torn, gone) as first, Mirror(FILES) as second:
        get_one(tmp_path, first, second)
    assert [(each.start, each.num_sent) for each in second.asked] == [(HALF, HALF)]
    with socket.socket() as unused:  # bound but not listening: connections are refused
        unused.bind(("127.0.0.1", 0))
        refusing = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        with Mirror(FILES, Answer(status=404)) as gone:
            message = failure(tmp_path / "none", gone, refusing)
    assert f"{gone.url}one.gz: " in message
    assert "404" in message
    assert f"{refusing}one.gz: Connection refused" in message
    assert f"samestep data get one --data-dir {tmp_path}/none --mirror URL" in message


@pytest.mark.parametrize("answer", [Answer(body=WRONG), Answer(body=b""), Answer(status=404)])
def test_another_mirror_takes_over_and_is_asked_first_from_then_on(tmp_path, answer):
    with Mirror(FILES, answer) as bad, Mirror(FILES) as good:
        paths = download("both", tmp_path, mirrors=[bad.url, good.url])
    assert [path.read_bytes() for path in paths] == list(FILES.values())
    assert {each.name for each in bad.asked} == {"one.gz"}


def test_two_downloads_into_one_folder_take_turns_and_fetch_each_file_once(tmp_path):
    slow = Answer(piece_bytes=5_000, pause_s=0.02)
    with Mirror(FILES, slow) as mirror, ThreadPoolExecutor() as pool:
        list(pool.map(get_one, [tmp_path] * 3, [mirror] * 3))
    assert [each.name for each in mirror.asked] == ["one.gz"]
    assert (tmp_path / "one.gz").read_bytes() == ONE


def kill_after_two_chunks(folder, url):
    def advance(_self, _task, _num_bytes, written=itertools.count(1)):  # noqa: B008 - one for all
        if next(written) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    catalog.CATALOG, os.environ["NO_PROXY"] = CATALOG, "127.0.0.1"
    downloading.Progress.advance = advance
    get_one(folder, url)


def test_a_killed_download_leaves_no_file_and_the_next_one_goes_on(tmp_path):
    data, num_written = tmp_path / "data", 2 * downloading._CHUNK_BYTES
    with Mirror(FILES) as mirror:
        child = start_ranks(kill_after_two_chunks, 1, tmp_path / "output", data, mirror.url)
        assert child.wait() == [-signal.SIGKILL], child.output()
        assert names_in(data) == ["one.gz.part"]
        get_one(data, mirror)
    assert [each.start for each in mirror.asked] == [None, num_written]
    assert mirror.asked[1].num_sent == len(ONE) - num_written
    assert (data / "one.gz").read_bytes() == ONE


def test_a_mirror_that_is_no_web_address_and_a_folder_that_cannot_be_made_are_named(tmp_path):
    for mirror in ("somewhere", "file:///data", "https://"):
        with pytest.raises(UserError, match=f"'{mirror}'"):
            get_one(tmp_path, mirror)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=str(tmp_path / "file")):
        get_one(tmp_path / "file", "http://127.0.0.1:1/")
