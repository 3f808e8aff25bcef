"""Whether the node with a certain peer id answers at a host and port: a fresh TCP connection, and libp2p's TLS handshake over it.

The daemon cannot be asked for that: it answers from a connection that is open already. The handshake ends as soon as the other side has
proved itself, by a certificate whose key is signed with the key inside the peer id; we show none.
https://github.com/libp2p/specs/blob/master/tls/tls.md
"""

from __future__ import annotations

import asyncio
import os
import ssl
from typing import Final

from blocktrain.node.identity import Identity
from blocktrain.protocol import ids
from blocktrain.protocol.ids import PeerId

MULTISTREAM: Final = b"/multistream/1.0.0\n"
TLS: Final = b"/tls/1.0.0\n"
SIGNED_PREFIX: Final = b"libp2p-tls-handshake:"
EXTENSION: Final = "1.3.6.1.4.1.53594.1.1"
KEY_BYTES: Final = 36  # an Ed25519 key in libp2p's envelope, the only kind of ours
SIGNATURE_BYTES: Final = 64


async def answers_as(host: str, port: int, peer: PeerId, timeout_s: float) -> str:
    """Why the node with this id does not answer there, or ""."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(_framed(MULTISTREAM) + _framed(TLS))
            for expected in (MULTISTREAM, TLS):
                if await reader.readexactly(len(expected) + 1) != _framed(expected):
                    return "something else than libp2p answers"
            await writer.start_tls(_context())
            certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return "" if certificate and is_of(certificate, peer) else "a node with another id answers"
    except TimeoutError:
        return "no answer"
    except asyncio.IncompleteReadError:
        return "it hung up"
    except ssl.SSLError:
        return "something else than libp2p answers"
    except OSError as error:
        return os.strerror(error.errno).lower() if error.errno else str(error)
    finally:
        if writer is not None:
            writer.transport.abort()


def is_of(certificate: bytes, peer: PeerId) -> bool:
    """Whether a TLS certificate (DER), whose key was proved in the handshake, was made by the holder of a peer id's key."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    try:
        sent = x509.load_der_x509_certificate(certificate)
        extension = sent.extensions.get_extension_for_oid(x509.ObjectIdentifier(EXTENSION)).value
        raw = ids.peer_bytes(peer)
        key, signature = _parts(extension.value if isinstance(extension, x509.UnrecognizedExtension) else b"")
        signed = SIGNED_PREFIX + sent.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension):
        return False
    return raw.endswith(key) and Identity.verify(raw, signature, signed)


def _parts(der: bytes) -> tuple[bytes, bytes]:
    """Key and signature out of libp2p's extension, a sequence of two byte strings. Raises: ValueError."""
    if len(der) != 6 + KEY_BYTES + SIGNATURE_BYTES:
        raise ValueError("not an Ed25519 key and its signature")
    key, signature = der[4 : 4 + KEY_BYTES], der[6 + KEY_BYTES :]
    heads = bytes((0x30, len(der) - 2, 0x04, KEY_BYTES)), bytes((0x04, SIGNATURE_BYTES))
    if der[:4] != heads[0] or der[4 + KEY_BYTES : 6 + KEY_BYTES] != heads[1]:
        raise ValueError("not a sequence of two byte strings")
    return key, signature


def _framed(line: bytes) -> bytes:
    return bytes([len(line)]) + line


def _context() -> ssl.SSLContext:
    """libp2p's certificates are self-signed and have no names: what counts is checked by `is_of`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["libp2p"])
    return context
