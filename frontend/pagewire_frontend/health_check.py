"""`python -m pagewire_frontend.health_check TARGET [SERVICE]`: whether a server is well, by its
exit status, for containers.

TARGET is a URL, which must answer with 200, or the address of a gRPC server (HOST:PORT, or unix:
and a path), which must call SERVICE serving (grpc.health.v1). It knows TLS and shows a certificate
to servers that ask for one; Kubernetes' own probes don't.
"""

from __future__ import annotations

import argparse
import asyncio
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

from pagewire.settings import SettingsError

TIMEOUT_S = 4.0


def main(argv: Sequence[str] | None = None) -> int:
    """Asks once.

    Returns:
        0 where it is well, 1 where it is not, 2 where the question makes no sense.
    """
    options = _parser().parse_args(argv)
    try:
        if "://" in options.target:
            reason = _http_trouble(options.target, options)
        else:
            reason = asyncio.run(_grpc_trouble(options))
    except SettingsError as error:
        print(f"health_check: error: {error}", file=sys.stderr)
        return 2
    if reason is not None:
        print(f"{options.target}: {reason}", file=sys.stderr)
    return 0 if reason is None else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pagewire_frontend.health_check")
    parser.add_argument("target", help="http(s)://HOST:PORT/PATH, HOST:PORT or unix:PATH")
    parser.add_argument("service", nargs="?", default="", help="gRPC service; default: the server")
    parser.add_argument("--ca", help="PEM file of the issuers of the server's certificate")
    parser.add_argument("--cert", help="PEM file of the certificate to show")
    parser.add_argument("--key", help="PEM file of its private key")
    parser.add_argument("--server-name", help="what the server's certificate names")
    return parser


def _http_trouble(url: str, options: argparse.Namespace) -> str | None:
    # This asks whether a server is well, not who it is: without --ca any certificate will do.
    context = ssl.create_default_context(cafile=options.ca)
    context.check_hostname = False
    if options.ca is None:
        context.verify_mode = ssl.CERT_NONE
    if options.cert is not None:
        context.load_cert_chain(options.cert, options.key)
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(url, timeout=TIMEOUT_S) as response:
            return None if response.status == 200 else f"status {response.status}"
    except urllib.error.HTTPError as error:
        return f"status {error.code}"
    except (OSError, ValueError) as error:
        return str(error)


async def _grpc_trouble(options: argparse.Namespace) -> str | None:
    # Late: a question over HTTP need not wait for grpc.
    from pagewire.tls import ClientTls
    from pagewire_frontend.probes import GrpcProbe

    tls = ClientTls.from_settings("--", options.ca, options.cert, options.key)
    probe = GrpcProbe(options.target, tls, options.server_name)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            serving = await probe.is_serving(options.service)
    except TimeoutError:
        return f"no answer within {TIMEOUT_S:.0f} s"
    finally:
        await probe.close()
    return None if serving else f"{options.service or 'the server'} is not serving"


if __name__ == "__main__":
    sys.exit(main())
