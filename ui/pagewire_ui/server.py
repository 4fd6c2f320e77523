"""Serves the chat page by uvicorn: by default on the loopbacks, for this machine alone."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import fastapi
import gradio as gr
import uvicorn
from starlette.staticfiles import StaticFiles

from pagewire.listening import listen, shown_host
from pagewire.settings import UnmetSettingError
from pagewire.tls import ClientTls
from pagewire_ui import assets
from pagewire_ui.config import UiConfig
from pagewire_ui.frontend_access import FrontendAccess
from pagewire_ui.frontend_link import FrontendLink
from pagewire_ui.page import Page, theme

# Whatever Gradio's files or a model's answer ask for, the browser fetches from this server alone.
_POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; object-src 'none'; base-uri 'self'"
)
# No component takes uploads: files are read in the browser.
_MAX_UPLOAD_BYTES = 1


class PageServer:
    """The chat page on a port.

    Raises:
        SettingsError: its certificates can't be used.
    """

    def __init__(self, config: UiConfig) -> None:
        self._config = config
        self._access = FrontendAccess(
            None if config.api_key is None else config.api_key.get_secret_value(),
            ClientTls.from_settings(
                "--frontend-", config.frontend_ca, config.frontend_cert, config.frontend_key
            ),
        )
        self.port = config.port

    def bind(self) -> list[socket.socket]:
        """Opens the listening sockets.

        Raises:
            SettingsError: the address is not this machine's.
            UnmetSettingError: the port is in use or forbidden.
        """
        try:
            sockets = listen(self._config.host, self.port, "--port")
        except OSError as error:
            raise UnmetSettingError(str(error)) from None
        self.port = int(sockets[0].getsockname()[1])
        return sockets

    async def run(self, sockets: list[socket.socket]) -> None:
        """Serves until SIGINT or SIGTERM."""
        link = FrontendLink(self._config.frontend, self._access)
        page = Page(link)
        server = _Server(
            uvicorn.Config(
                make_app(page, self._config, self._access),
                log_config=None,  # or its lines would have a format of their own
                log_level=None,
                access_log=self._config.log_level == "debug",
                # Browsers hold event streams open for as long as the page is shown.
                timeout_graceful_shutdown=1,
            )
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, server.end)
        print(
            f"pagewire-ui is ready: http://{shown_host(self._config.host)}:{self.port}, asking the "
            f"frontend at {self._config.frontend}",
            flush=True,
        )
        try:
            await server.serve(sockets=sockets)
        finally:
            await page.watch.close()
            await link.close()


def make_app(page: Page, config: UiConfig, access: FrontendAccess) -> Any:
    """The ASGI application: the page, kept to this server by its content security policy."""
    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.mount(f"/{assets.url_path()}", StaticFiles(directory=assets.FOLDER))
    mounted = gr.mount_gradio_app(
        app,
        page.build().queue(default_concurrency_limit=None, api_open=False),
        path="/",
        auth=_login(config, access),
        auth_message="Any name will do; the password is an API key of this server."
        if config.login
        else None,
        root_path=config.root_path or None,
        max_file_size=_MAX_UPLOAD_BYTES,
        footer_links=[],
        ssr_mode=False,
        enable_monitoring=False,
        show_error=False,
        mcp_server=False,
        pwa=False,
        theme=theme(),
        css_paths=assets.STYLE_SHEETS,
    )
    return _PolicyMiddleware(mounted)


def _login(config: UiConfig, access: FrontendAccess) -> Callable[..., Any] | None:
    """What says whether someone may see the page, by name and password; None: it is open."""
    if config.login:

        async def key_is_accepted(user: str, password: str) -> bool:
            return await access.accepts(config.frontend, password)

        return key_is_accepted
    if config.auth is None:
        return None
    known = [pair.encode() for pair in config.auth.get_secret_value().split(",")]

    def is_known(user: str, password: str) -> bool:
        given = f"{user}:{password}".encode()
        # Each in constant time, and all of them.
        return sum(hmac.compare_digest(given, pair) for pair in known) > 0

    return is_known


class _PolicyMiddleware:
    """Adds the content security policy to every answer."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", []))
                headers.append((b"content-security-policy", _POLICY.encode()))
                headers.append((b"referrer-policy", b"no-referrer"))
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_policy)


class _Server(uvicorn.Server):
    """uvicorn, but a signal ends it with status 0 instead of being raised again."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        """Asks it to end; a second time, not to wait for anybody."""
        self.force_exit = self.should_exit
        self.should_exit = True
