"""Who may look, what every answer says to the browser, and what the viewer needs before it answers."""

import os
import re
import socket
import stat
import subprocess
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.view.conftest import TOKEN, Viewer
from treetune.view.app import _users_token, application, serve
from treetune.view.store import Store


@pytest.fixture
def stranger(store: Store) -> TestClient:
    return TestClient(application(store, TOKEN), base_url="http://127.0.0.1:6680", follow_redirects=False)


@pytest.mark.parametrize("path", ["/", "/run?run=x", "/assets/viewer.js", "/?token=wrong"])
def test_nothing_is_shown_to_who_does_not_know_the_token(stranger: TestClient, path: str) -> None:
    answer = stranger.get(path)
    assert answer.status_code == 403
    assert "token" in answer.text and "<" not in answer.text


def test_the_token_leaves_the_address_for_a_cookie_that_no_other_site_can_send(stranger: TestClient) -> None:
    answer = stranger.get(f"/run?run=a&token={TOKEN}&run=b")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/run?run=a&run=b"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and "max-age=" in cookie
    assert stranger.get("/").status_code == 200


@pytest.mark.parametrize("path", ["//evil.example/", "///evil.example", "/\\evil.example/"])
def test_the_token_leads_to_no_other_host(stranger: TestClient, path: str) -> None:
    answer = stranger.get(f"http://127.0.0.1:6680{path}?token={TOKEN}")
    assert answer.status_code == 303
    assert answer.headers["location"].strip("/") in ("evil.example", "%5Cevil.example")
    assert not answer.headers["location"].startswith(("//", "/\\"))


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "evil.example:6680", "", "["])
def test_a_name_that_leads_here_from_elsewhere_is_refused(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:7777", "localhost:6680", "[::1]:1234"])
def test_a_tunnel_may_end_at_any_port_of_the_own_machine(store: Store, host: str) -> None:
    asking = TestClient(application(store, TOKEN), base_url=f"http://{host}")
    assert asking.get("/", params={"token": TOKEN}).status_code == 200


@pytest.mark.parametrize("origin", [None, "http://evil.example", "null", "http://127.0.0.1:1"])
def test_another_sites_page_can_send_nothing(client: TestClient, origin: str | None) -> None:
    assert client.post("/", headers={"origin": origin} if origin else {}).status_code == 403


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS"])
def test_the_viewer_reads(client: TestClient, method: str) -> None:
    assert client.request(method, "/").status_code == 405


@pytest.mark.parametrize("path", ["/", "/run?run=x", "/assets/viewer.js", "/nowhere"])
def test_every_answer_forbids_what_a_text_could_smuggle_in(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "http" not in policy
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "same-origin")


def test_templates_have_no_style_attribute_and_no_inline_script() -> None:
    import treetune.view

    for template in (Path(treetune.view.__file__).parent / "templates").glob("*.html"):
        text = template.read_text()
        if "<style>" in text or 'extends "document.html"' in text:
            continue  # files that are saved, and not pages of the viewer
        assert " style=" not in text and "javascript:" not in text, template
        assert all("src=" in tag.split(">")[0] for tag in text.split("<script")[1:]), template


def test_what_runs_wrote_is_kept_nowhere_and_libraries_are_asked_for_by_their_mark(
    client: TestClient,
) -> None:
    library = client.get("/assets/vendor/uplot.js")
    again = client.get("/assets/vendor/uplot.js", headers={"if-none-match": library.headers["etag"]})
    assert client.get("/").headers["cache-control"] == "no-store"
    assert (library.headers["cache-control"], again.status_code) == ("no-cache", 304)


def test_the_libraries_of_the_browsers_side_are_those_that_were_fetched() -> None:
    script = Path(__file__).parents[2] / "scripts" / "viewer_assets.sh"
    assert subprocess.run([script, "--check"], capture_output=True, timeout=60, check=False).returncode == 0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREETUNE_VIEWER_CACHE", str(tmp_path / "deep" / "cache"))
    return tmp_path / "deep" / "cache"


def test_a_port_that_is_none_is_refused_and_what_is_kept_is_for_its_reader_alone(
    tmp_path: Path, cache: Path
) -> None:
    before = os.umask(0o022)
    try:
        with pytest.raises(ValueError, match=r"--port is 99999 and must be from 0 .any free one. to 65535"):
            serve([tmp_path], print, port=99_999)
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.usefixtures("cache")
def test_a_port_that_is_taken_is_said_to_be_and_one_that_may_not_be_had_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} is not available .*Address already in use"):
            serve([tmp_path], print, port=port)

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refused)
    with pytest.raises(ValueError, match=r"port 80 is not available .*\(Permission denied\)"):
        serve([tmp_path], print, port=80)


def test_who_gives_no_token_has_the_same_one_after_a_restart_and_a_short_one_is_refused(
    tmp_path: Path, cache: Path
) -> None:
    with pytest.raises(ValueError, match="the token has 6 characters and must have at least 16"):
        serve([tmp_path], print, token="secret")
    first = _users_token(cache / "token")
    assert first == _users_token(cache / "token") and len(first) >= 32
    assert stat.S_IMODE((cache / "token").stat().st_mode) == 0o600


def test_another_host_is_asked_for_by_its_name_alone_and_a_proxy_may_speak_tls(store: Store) -> None:
    hosts = ["127.0.0.1", "viewer.lab.example"]
    app = application(store, TOKEN, hosts)
    asking = TestClient(app, base_url="https://viewer.lab.example", follow_redirects=False)
    assert asking.get("/", params={"token": TOKEN}).status_code == 303
    assert asking.get("/").status_code == 200
    sent = asking.post("/answer?run=none", headers={"origin": "https://viewer.lab.example"})
    assert sent.status_code == 404, "no origin's fault"
    assert asking.post("/answer", headers={"origin": "https://evil.example"}).status_code == 403
    other = TestClient(app, base_url="http://elsewhere.example")
    assert "available as 127.0.0.1 or viewer.lab.example" in other.get("/").text


def test_a_page_whose_path_begins_with_the_letters_of_the_base_is_found(viewer: Viewer) -> None:
    viewer.record()
    app = application(viewer.store, TOKEN, base_url="https://hub.example/answ/")
    asking = TestClient(app, base_url="http://127.0.0.1:6680", follow_redirects=False)
    entered = asking.get("/answers", params={"token": TOKEN, "run": "run"})
    assert entered.headers["location"] == "/answ/answers?run=run"


@pytest.mark.parametrize("beginning", ["", "/user/me/proxy/6680"])
def test_behind_a_proxy_with_a_path_all_links_have_it_whether_the_proxy_takes_it_away_or_not(
    viewer: Viewer, beginning: str
) -> None:
    viewer.record()
    base = "/user/me/proxy/6680"
    app = application(viewer.store, TOKEN, base_url=f"https://hub.example{base}/")
    asking = TestClient(app, base_url="http://127.0.0.1:6680", follow_redirects=False)
    entered = asking.get(f"{beginning}/answers", params={"token": TOKEN, "run": "run"})
    assert entered.headers["location"] == f"{base}/answers?run=run"
    page = asking.get(f"{beginning}/answers?run=run").text
    links = re.findall(r'(?:href|src|action|data-later)="(/[^"]*)', page)
    assert len(links) > 20 and [one for one in links if not one.startswith(base + "/")] == []
    assert asking.get(f"{beginning}/assets/viewer.js").status_code == 200
    first = asking.get(f"{beginning}/answer?run=run&page=1")
    assert first.headers["location"].startswith(f"{base}/answer?")
    origin = {"origin": "https://hub.example"}
    assert asking.post(f"{beginning}/answer?run=none", headers=origin).status_code == 404, "no origin's fault"
    with pytest.raises(ValueError, match="--base-url is /x and must be a whole address"):
        serve([viewer.folder], print, base_url="/x")
