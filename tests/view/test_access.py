"""Access to the viewer.

Promises that these tests hold:

* Only who has the token sees a page; no other host, site or page can read or send anything.
* Every answer forbids the browser to run or load what texts contain.
* Ports, tokens, hosts and base addresses that can't work are refused at the start; the cache is private.
* Behind a proxy with a path, all links have the path.
"""

import os
import re
import socket
import stat
import subprocess
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.view.conftest import TOKEN, Viewer
from treetune.view.app import _read_or_make_token, make_application, serve
from treetune.view.store import Store


@pytest.fixture
def stranger(store: Store) -> TestClient:
    return TestClient(
        make_application(store, TOKEN), base_url="http://127.0.0.1:6680", follow_redirects=False
    )


@pytest.mark.parametrize("path", ["/", "/run?run=x", "/assets/viewer.js", "/?token=wrong"])
def test_nothing_is_shown_without_the_token(stranger: TestClient, path: str) -> None:
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
def test_a_request_to_another_host_name_is_refused(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:7777", "localhost:6680", "[::1]:1234"])
def test_a_tunnel_may_end_at_any_port_of_the_browsers_machine(store: Store, host: str) -> None:
    asking = TestClient(make_application(store, TOKEN), base_url=f"http://{host}")
    assert asking.get("/", params={"token": TOKEN}).status_code == 200


@pytest.mark.parametrize("origin", [None, "http://evil.example", "null", "http://127.0.0.1:1"])
def test_another_sites_page_can_send_nothing(client: TestClient, origin: str | None) -> None:
    assert client.post("/", headers={"origin": origin} if origin else {}).status_code == 403


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS"])
def test_methods_that_change_something_are_refused(client: TestClient, method: str) -> None:
    assert client.request(method, "/").status_code == 405


@pytest.mark.parametrize("path", ["/", "/run?run=x", "/assets/viewer.js", "/nowhere"])
def test_every_response_forbids_scripts_and_frames_of_others(client: TestClient, path: str) -> None:
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
            continue  # these are saved as files, and are no pages of the viewer
        assert " style=" not in text and "javascript:" not in text, template
        assert all("src=" in tag.split(">")[0] for tag in text.split("<script")[1:]), template


def test_browsers_store_no_page_and_revalidate_libraries(
    client: TestClient,
) -> None:
    library = client.get("/assets/vendor/uplot.js")
    again = client.get("/assets/vendor/uplot.js", headers={"if-none-match": library.headers["etag"]})
    assert client.get("/").headers["cache-control"] == "no-store"
    assert (library.headers["cache-control"], again.status_code) == ("no-cache", 304)


def test_the_javascript_libraries_are_the_ones_in_the_list_with_their_checksums() -> None:
    script = Path(__file__).parents[2] / "scripts" / "viewer_assets.sh"
    assert subprocess.run([script, "--check"], capture_output=True, timeout=60, check=False).returncode == 0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREETUNE_VIEWER_CACHE", str(tmp_path / "deep" / "cache"))
    return tmp_path / "deep" / "cache"


def test_an_impossible_port_is_refused_and_the_cache_is_private(tmp_path: Path, cache: Path) -> None:
    before = os.umask(0o022)
    try:
        with pytest.raises(ValueError, match=r"--port is 99999 and must be from 0 .any free one. to 65535"):
            serve([tmp_path], print, port=99_999)
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.usefixtures("cache")
def test_a_taken_port_and_a_forbidden_port_have_different_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other_program:
        port = other_program.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} is not available .*Address already in use"):
            serve([tmp_path], print, port=port)

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refused)
    with pytest.raises(ValueError, match=r"port 80 is not available .*\(Permission denied\)"):
        serve([tmp_path], print, port=80)


def test_the_generated_token_survives_a_restart_and_a_short_one_is_refused(
    tmp_path: Path, cache: Path
) -> None:
    with pytest.raises(ValueError, match="the token has 6 characters and must have at least 16"):
        serve([tmp_path], print, token="secret")
    first = _read_or_make_token(cache / "token")
    assert first == _read_or_make_token(cache / "token") and len(first) >= 32
    assert stat.S_IMODE((cache / "token").stat().st_mode) == 0o600


def test_a_named_host_is_reached_by_its_name_only_and_a_proxy_may_use_tls(store: Store) -> None:
    hosts = ["127.0.0.1", "viewer.lab.example"]
    app = make_application(store, TOKEN, hosts)
    asking = TestClient(app, base_url="https://viewer.lab.example", follow_redirects=False)
    assert asking.get("/", params={"token": TOKEN}).status_code == 303
    assert asking.get("/").status_code == 200
    sent = asking.post("/answer?run=none", headers={"origin": "https://viewer.lab.example"})
    assert sent.status_code == 404, "the origin is accepted, and there is no such run"
    assert asking.post("/answer", headers={"origin": "https://evil.example"}).status_code == 403
    other = TestClient(app, base_url="http://elsewhere.example")
    assert "available as 127.0.0.1 or viewer.lab.example" in other.get("/").text


def test_a_page_whose_path_begins_with_the_letters_of_the_base_is_found(viewer: Viewer) -> None:
    viewer.record()
    app = make_application(viewer.store, TOKEN, base_url="https://hub.example/answ/")
    asking = TestClient(app, base_url="http://127.0.0.1:6680", follow_redirects=False)
    entered = asking.get("/answers", params={"token": TOKEN, "run": "run"})
    assert entered.headers["location"] == "/answ/answers?run=run"


@pytest.mark.parametrize("beginning", ["", "/user/me/proxy/6680"])
def test_behind_a_proxy_with_a_path_all_links_have_it_whether_the_proxy_takes_it_away_or_not(
    viewer: Viewer, beginning: str
) -> None:
    viewer.record()
    base = "/user/me/proxy/6680"
    app = make_application(viewer.store, TOKEN, base_url=f"https://hub.example{base}/")
    asking = TestClient(app, base_url="http://127.0.0.1:6680", follow_redirects=False)
    entered = asking.get(f"{beginning}/answers", params={"token": TOKEN, "run": "run"})
    assert entered.headers["location"] == f"{base}/answers?run=run"
    page = asking.get(f"{beginning}/answers?run=run").text
    links = re.findall(r'(?:href|src|action|data-later)="(/[^"]*)', page)
    assert len(links) > 20 and [link for link in links if not link.startswith(base + "/")] == []
    assert asking.get(f"{beginning}/assets/viewer.js").status_code == 200
    first = asking.get(f"{beginning}/answer?run=run&page=1")
    assert first.headers["location"].startswith(f"{base}/answer?")
    origin = {"origin": "https://hub.example"}
    assert asking.post(f"{beginning}/answer?run=none", headers=origin).status_code == 404, (
        "the origin is accepted, and there is no such run"
    )
    with pytest.raises(ValueError, match="--base-url is /x and must be a whole address"):
        serve([viewer.folder], print, base_url="/x")
