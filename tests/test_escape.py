"""Names from files where people see them, and a server that serves its site only."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from onward.cli.commands.inspect import render_page
from onward.conformance import Conformance, Row
from onward.escape import csv_cell, printable
from onward.runtime.device_check import Verdict
from onward.train.history import History
from onward.train.report import Figure, list_files, render_report
from onward.web import serving
from onward.web.serving import make_server


@pytest.mark.parametrize("text", ["\x1b[2J", "\x07", "\u202e", "\x9b31m", "\r", "\u2028"])
def test_no_control_character_is_shown(text: str) -> None:
    assert printable(f"a{text}b").isprintable()


@pytest.mark.parametrize("text", ["=1+1", "+1", "-cmd", "@SUM(1)", "\t=1"])
def test_no_cell_is_a_formula(text: str) -> None:
    assert str(csv_cell(text)).startswith("'")


def test_a_history_writes_safe_cells(tmp_path: Path) -> None:
    History(epochs=[{"epoch": 1, "=A1": "=1+1"}]).write_csv(tmp_path / "h.csv")
    assert (tmp_path / "h.csv").read_text().splitlines() == ["epoch,'=A1", "1,'=1+1"]


def test_a_report_links_to_files_of_its_folder_only(tmp_path: Path) -> None:
    for name in ("best", "javascript:alert(1)"):
        (tmp_path / name).write_text("")
    (tmp_path / "away").symlink_to("/etc/passwd")
    names = list_files(tmp_path, without="report.html")
    assert names == ["best", "javascript:alert(1)"]
    page = render_report(History(), files=names)
    assert 'href="./javascript%3Aalert%281%29"' in page and "default-src 'none'" in page


def test_no_name_of_a_page_is_more_than_text() -> None:
    """Names of classes, columns, runs and devices: no tag, no end of an attribute, no turned direction of writing."""
    name = "<script>'\x1b[31m\u202e"
    history = History(
        steps=[{"step": step, "loss": 1.0} for step in (1, 2)],
        epochs=[{"epoch": step, "step": step, name: 1.0} for step in (1, 2)],
        confusion=[[1, 2], [3, 4]], classes=[name, "b"],
    )  # fmt: skip
    figures = [Figure(name, caption=name, text=name, table=[[name]])]
    report = render_report(
        history, title=name, settings={name: name}, environment={name: name}, files=[name], figures=figures
    )
    conformance = Conformance(name, {name: name}, [Row(name, name, Verdict("form", form=name))]).to_html()
    contents = render_page({"kind": name, "path": name}, [(name, [name], [[name]])])
    for page in (report, conformance, contents):
        assert "&lt;script&gt;" in page
        assert not any(mark in page for mark in ("<script", "\x1b", "\u202e", "script>'"))


@pytest.fixture
def port(tmp_path: Path):
    site = tmp_path / "site"
    (site / "folder").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (site / "index.html").write_text("<script>1</script>")
    (site / "folder" / "file.txt").write_text("file")
    (site / ".hidden").write_text("hidden")
    (site / "link").symlink_to(tmp_path / "secret")
    with make_server(site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def get(port: int, path: str, host: str = "localhost") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", path, headers={"Host": host})
    response = connection.getresponse()
    response.read()
    return response


def test_only_the_site_is_served(port: int) -> None:
    for path in ("/", "/index.html", "/folder/file.txt"):
        assert get(port, path).status == 200, path
    for path in ("/folder/", "/link", "/.hidden", "/../secret", "/%2e%2e/secret", "/none"):
        assert get(port, path).status == 404, path
    assert get(port, "/", f"localhost:{port}").status == 200
    for host in ("evil.example", "evil.example:80", "", "127.0.0.1.evil.example"):
        assert get(port, "/", host).status == 421, host
    policy = get(port, "/").headers["Content-Security-Policy"]
    assert "script-src 'self'" in policy and "sha256-" in policy and "frame-ancestors 'none'" in policy


def test_a_client_that_leaves_in_the_middle_is_no_traceback(
    port: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site" / "large.bin").write_bytes(bytes(1 << 24))
    for request in (b"GET /large.bin HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET", b""):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(request)
            client.recv(100 if len(request) > 3 else 0)
            # closed with a reset, as when a browser's tab is closed
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert get(port, "/").status == 200
    time.sleep(0.2)
    assert capfd.readouterr().err == ""


def test_idle_connections_are_closed_and_bounded(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.Handler, "timeout", 0.2)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        assert client.recv(1) == b""
    monkeypatch.setattr(serving.Handler, "timeout", 10)
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)) for _ in range(257)
        ]
        assert clients[-1].recv(1) == b""
    time.sleep(0.2)
    assert get(port, "/").status == 200
