"""The Files API over real HTTP."""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from sqlalchemy import text

from api.files import parse_range
from tests.api.conftest import Served
from tests.api.live_gateway import LiveGateway

LINE = b'{"custom_id":"a"}\n'


@dataclass(slots=True)
class Files:
    """A gateway with a folder of its own, and two tenants' clients."""

    http: httpx.Client
    stranger: httpx.Client
    sdk: openai.OpenAI
    folder: Path

    def upload(self, content: bytes = LINE, filename: str = "x.jsonl", **fields: str) -> str:
        """A new file's id."""
        response = self.http.post(
            "/v1/files",
            files={"file": (filename, content)},
            data={"purpose": "batch", **fields},
        )
        assert response.status_code == 200, response.text
        file_id = response.json()["id"]
        assert isinstance(file_id, str)
        return file_id


@pytest.fixture
def files(
    start_gateway: Callable[..., LiveGateway], served: Served, tmp_path: Path
) -> Iterator[Files]:
    """The API, with an empty store."""
    live = start_gateway(data_dir=tmp_path)
    clients = []
    for tenant in (f"files-{secrets.token_hex(4)}", f"strangers-{secrets.token_hex(4)}"):
        _, key = served.new_key("batch", tenant=tenant)
        headers = {"authorization": f"Bearer {key}"}
        base = f"http://127.0.0.1:{live.port}"
        clients.append((key, httpx.Client(base_url=base, headers=headers, timeout=60)))
    (key, http), (_, stranger) = clients
    sdk = openai.OpenAI(base_url=live.url, api_key=key, max_retries=0)
    with http, stranger, sdk:
        yield Files(http, stranger, sdk, tmp_path / "files")


def test_the_official_client_uploads_looks_reads_lists_and_deletes(files: Files) -> None:
    content = LINE * 100_000
    created = files.sdk.files.create(file=("in.jsonl", content), purpose="batch")
    assert created.id.startswith("file-")
    assert created.bytes == len(content)
    assert created.filename == "in.jsonl"
    assert created.purpose == "batch"
    assert created.status == "processed"
    assert created.expires_at is not None
    assert created.expires_at - created.created_at == 30 * 86_400
    assert files.sdk.files.retrieve(created.id) == created
    assert files.sdk.files.content(created.id).read() == content
    assert [file.id for file in files.sdk.files.list()] == [created.id]
    assert files.sdk.files.delete(created.id).deleted
    assert list(files.folder.iterdir()) == []
    with pytest.raises(openai.NotFoundError):
        files.sdk.files.retrieve(created.id)


def test_another_tenants_file_and_no_file_are_told_alike(files: Files) -> None:
    file_id = files.upload()
    nobody = "file-" + "0" * 26
    for path in ("/v1/files/{}", "/v1/files/{}/content"):
        theirs = files.stranger.get(path.format(file_id))
        invented = files.stranger.get(path.format(nobody))
        assert theirs.status_code == invented.status_code == 404
        assert theirs.text.replace(file_id, nobody) == invented.text
    assert files.stranger.delete(f"/v1/files/{file_id}").status_code == 404
    assert files.stranger.get("/v1/files").json()["data"] == []
    assert files.stranger.get(f"/v1/files?after={file_id}").status_code == 400
    assert files.http.get(f"/v1/files/{file_id}").status_code == 200


def test_a_key_without_the_scope_is_refused(files: Files, served: Served) -> None:
    headers = {"authorization": f"Bearer {served.key}"}
    assert files.http.get("/v1/files", headers=headers).status_code == 403


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/passwd", "%2e%2e/x", "a\\b", "ü 世界.jsonl", "x" * 1000]
)
def test_a_filename_is_data_and_nothing_else(files: Files, name: str) -> None:
    file_id = files.upload(filename=name)
    assert files.http.get(f"/v1/files/{file_id}").json()["filename"] == name
    assert [path.name for path in files.folder.iterdir()] == [file_id]


@pytest.mark.parametrize("file_id", ["..%2f..%2fetc", "%00", "file-%00", "x" * 3000, "%F0%9F%98"])
def test_an_id_that_is_none_is_not_found(files: Files, file_id: str) -> None:
    assert files.http.get(f"/v1/files/{file_id}").status_code == 404
    assert files.http.delete(f"/v1/files/{file_id}").status_code == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({}, "purpose"),
        ({"purpose": "batch", "color": "red"}, "color"),
        ({"purpose": "batch", "expires_after[anchor]": "now"}, "expires_after[anchor]"),
        (
            {
                "purpose": "batch",
                "expires_after[anchor]": "created_at",
                "expires_after[seconds]": "3599",
            },
            "expires_after[seconds]",
        ),
    ],
)
def test_a_wrong_form_is_refused_and_leaves_nothing(
    files: Files, fields: dict[str, str], param: str
) -> None:
    response = files.http.post("/v1/files", files={"file": ("x", LINE)}, data=fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert list(files.folder.iterdir()) == []
    assert files.http.get("/v1/files").json()["data"] == []


def test_a_broken_body_is_refused_and_leaves_nothing(files: Files) -> None:
    form = {"content-type": "multipart/form-data; boundary=b"}
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    bodies = [
        b"",
        b"garbage",
        part + b"never ended",
        part + b"x\r\n" + part + b"x\r\n--b--\r\n",
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n',
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + b"x" * 5000,
        b"--b\r\n" + b"X: y\r\n" * 5000,
        part.replace(b'filename="x"', b'filename="a\0b"') + b"x\r\n--b--\r\n",
    ]
    for body in bodies:
        response = files.http.post("/v1/files", content=body, headers=form)
        assert response.status_code == 400, (body[:80], response.text)
    assert files.http.post("/v1/files", json={}).status_code == 415
    assert not files.folder.exists() or list(files.folder.iterdir()) == []


def test_the_size_limit_is_exact(files: Files) -> None:
    head = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    )
    form = {"content-type": "multipart/form-data; boundary=b"}

    def body(num_bytes: int) -> Iterator[bytes]:
        yield head
        piece = b"0" * 2**20
        for _ in range(num_bytes // len(piece)):
            yield piece
        yield b"0" * (num_bytes % len(piece)) + b"\r\n--b--\r\n"

    most = files.http.post("/v1/files", content=body(209_715_200), headers=form)
    assert most.status_code == 200
    assert most.json()["bytes"] == 209_715_200
    more = files.http.post("/v1/files", content=body(209_715_201), headers=form)
    assert more.status_code == 413
    assert more.json()["error"]["code"] == "request_too_large"
    assert len(list(files.folder.iterdir())) == 1


def test_pages_never_skip_and_survive_the_deletion_of_their_cursor(
    files: Files, served: Served
) -> None:
    ids = [files.upload() for _ in range(5)]
    with served.database.begin() as connection:
        # Ties in time are broken by id, in both directions.
        connection.execute(
            text(
                "UPDATE files SET created_at = (SELECT min(created_at) FROM files "
                "WHERE file_id = ANY(:ids)) WHERE file_id = ANY(:ids)"
            ),
            {"ids": ids},
        )
    for order in ("asc", "desc"):
        seen: list[str] = []
        page = files.http.get("/v1/files", params={"limit": 2, "order": order}).json()
        seen += [file["id"] for file in page["data"]]
        while page["has_more"]:
            query = {"limit": 2, "order": order, "after": page["last_id"]}
            page = files.http.get("/v1/files", params=query).json()
            seen += [file["id"] for file in page["data"]]
        assert seen == sorted(ids, reverse=order == "desc")
    assert files.http.delete(f"/v1/files/{sorted(ids)[1]}").status_code == 200
    after = {"after": sorted(ids)[1], "order": "asc"}
    page = files.http.get("/v1/files", params=after).json()
    assert [file["id"] for file in page["data"]] == sorted(ids)[2:]
    assert files.http.get("/v1/files", params={"after": "file-x"}).status_code == 400
    assert files.http.get("/v1/files", params={"limit": 0}).status_code == 400
    assert files.http.get("/v1/files", params={"purpose": "batch_output"}).json()["data"] == []


def test_one_range_is_honoured_and_everything_else_is_the_whole_file(files: Files) -> None:
    content = bytes(range(100))
    path = f"/v1/files/{files.upload(content)}/content"

    def ask(header: str) -> httpx.Response:
        return files.http.get(path, headers={"range": header})

    part = ask("bytes=10-19")
    assert (part.status_code, part.content) == (206, content[10:20])
    assert part.headers["content-range"] == "bytes 10-19/100"
    assert ask("bytes=90-").content == content[90:]
    assert ask("bytes=-5").content == content[-5:]
    assert ask("bytes=90-1000").headers["content-range"] == "bytes 90-99/100"
    past = ask("bytes=100-")
    assert (past.status_code, past.headers["content-range"]) == (416, "bytes */100")
    assert ask("bytes=-0").status_code == 416
    many = "bytes=" + ",".join(f"{i}-{i}" for i in range(1000))
    for header in ("bytes=5-3", "bytes=0-1,2-3", "bytes=--1", "lines=1-2", "bytes=", many):
        whole = ask(header)
        assert (whole.status_code, whole.content) == (200, content), header


def test_a_hostile_range_costs_nothing() -> None:
    assert parse_range("bytes=" + "0-0," * 10_000, 10) is None
    assert parse_range("bytes=" + "9" * 1000 + "-", 10) is None
    assert parse_range(None, 10) is None
