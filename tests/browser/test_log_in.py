"""A dashboard behind a real OpenID Connect log-in, in a real Chromium: visitors are refused or admitted."""

import json
import threading
import time
from base64 import b64decode
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, urlsplit

import make_run
import pytest
import screenshots
from joserfc import jwt
from joserfc.jwk import RSAKey

CLIENT, SECRET = "tidegauge", "known-to-both"
RIGHT, WRONG = "ada@team.example.org", "mallory@example.org"
KEY = RSAKey.generate_key(2048, parameters={"kid": "1"})
NONCES = {}


class Provider(BaseHTTPRequestHandler):
    """Provider that lets in the user `account`; None is a user that it refuses itself."""

    account = None

    def do_GET(self):
        url = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path == "/.well-known/openid-configuration":
            places = {"authorization_endpoint": "/authorize", "token_endpoint": "/token", "jwks_uri": "/keys"}
            self._answer({"issuer": self._base, **{name: self._base + path for name, path in places.items()}})
        elif url.path == "/keys":
            self._answer({"keys": [KEY.as_dict(private=False)]})
        elif url.path == "/authorize":
            assert asked["client_id"] == CLIENT
            result = "error=access_denied" if self.account is None else f"code={quote(self.account)}"
            NONCES[self.account] = asked["nonce"]
            self.send_response(302)
            self.send_header("Location", f"{asked['redirect_uri']}?{result}&state={quote(asked['state'])}")
            self.end_headers()

    def do_POST(self):
        body = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        assert b64decode(self.headers["Authorization"].split()[1]).decode() == f"{CLIENT}:{SECRET}"
        email, now = body["code"][0], int(time.time())
        claims = {"iss": self._base, "aud": CLIENT, "sub": email, "iat": now, "exp": now + 60}
        claims |= {"nonce": NONCES[email], "email": email, "email_verified": True}
        token = jwt.encode({"alg": "RS256", "kid": "1"}, claims, KEY)
        self._answer({"access_token": "x", "token_type": "Bearer", "id_token": token})

    @property
    def _base(self):
        return f"http://localhost:{self.server.server_port}"

    def _answer(self, document):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    def log_message(self, *_):
        pass


@contextmanager
def provider():
    with ThreadingHTTPServer(("localhost", 0), Provider) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def page(tmp_path):
    pytest.importorskip("authlib")
    make_run.make_run(tmp_path, make_run.HEALTHY)
    port = screenshots.free_port()
    with provider() as base:
        secrets = tmp_path / "secrets.toml"
        secrets.write_text(
            f'[auth]\nredirect_uri = "http://localhost:{port}/oauth2callback"\ncookie_secret = "{"c" * 32}"\n'
            f'client_id = "{CLIENT}"\nclient_secret = "{SECRET}"\n'
            f'server_metadata_url = "{base}/.well-known/openid-configuration"\n'
            '[tidegauge]\nvisitors = ["@team.example.org"]\n'
        )
        options = ("--secrets.files", str(secrets))
        with (
            screenshots.dashboard(tmp_path, port=port, options=options) as address,
            screenshots.chromium() as chrome,
        ):
            page = chrome.new_page()
            page.goto(address)
            yield page


def test_only_listed_visitors_see_runs(page):
    for account in (None, WRONG, RIGHT):
        Provider.account = account
        page.get_by_text("Log in to see the runs").wait_for()
        assert "healthy" not in page.content()
        with page.expect_navigation(url="**/"):
            page.get_by_role("button", name="Log in").click()
        if account == WRONG:
            page.get_by_text(f"{WRONG} is not among the visitors").wait_for()
            assert "healthy" not in page.content()
            page.get_by_role("button", name="Log out").click()
    screenshots.await_view(page)
    assert "healthy" in page.content()
    assert set(NONCES) == {None, WRONG, RIGHT}  # the provider was asked each time
