"""The directory of a region: the newest start of each process counts, also among starts that meet."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from etude.objects import ObjectStore
from etude.run.directory import Directory
from etude.run.process_name import ProcessName

ENGINE = ProcessName(command="serve", replica=1, region="eu")
GATEWAY = ProcessName(command="gateway", region="eu")


def test_the_newest_start_of_each_process_counts(tmp_path: Path) -> None:
    directory = Directory(ObjectStore(str(tmp_path)))
    assert directory.urls("serve") == {}
    for port in range(1, 13):
        directory.announce(ENGINE, f"http://10.0.0.1:{port}")
    directory.announce(GATEWAY, "https://10.0.0.2:1")
    assert directory.urls("serve") == {ENGINE: "http://10.0.0.1:12"}
    assert directory.urls("gateway") == {GATEWAY: "https://10.0.0.2:1"}
    assert len(directory.objects.list("")) == 2  # nothing piles up


def test_of_two_starts_at_a_time_one_is_the_newest(tmp_path: Path) -> None:
    urls = [f"http://10.0.0.1:{port}" for port in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda url: Directory(ObjectStore(str(tmp_path))).announce(ENGINE, url), urls))
    assert Directory(ObjectStore(str(tmp_path))).urls("serve")[ENGINE] in urls
