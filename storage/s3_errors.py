"""What may go wrong with an object store, as what a store raises, with the way out."""

from aiohttp import ClientError as BrokenConnection
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    SSLError,
)
from botocore.exceptions import ConnectionError as NoConnection
from botocore.parsers import ResponseParserError

from cairn.storage.errors import NoSpace, StoreError, StoreRefused

REQUEST_ERRORS = (OSError, BotoCoreError, ClientError, BrokenConnection, ResponseParserError)
"""What s3fs raises."""

KEYS = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE)"
_REGION = "it lies in another region; set AWS_REGION to the bucket's"
_REFUSALS = {
    "InvalidAccessKeyId": f"the access key is unknown; {KEYS}",
    "SignatureDoesNotMatch": f"the secret key is wrong; {KEYS}",
    "ExpiredToken": "the session token has expired; log in again",
    "InvalidToken": "the session token is not valid; log in again",
    "RequestTimeTooSkewed": "this machine's clock is wrong; set it",
    "NoSuchBucket": "there is no such bucket; create it or name another",
    "InvalidBucketName": "the bucket's name is not valid; name another",
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "QuotaExceeded": "its quota is used up; free some space or raise it",
    "XMinioStorageFull": "no space is left there; free some",
}
_FULL = frozenset({"QuotaExceeded", "XMinioStorageFull"})
_FULL_STATUS = 507
_REFUSED_STATUS = {
    401: f"access is denied; {KEYS}",
    403: f"access is denied; {KEYS} and the bucket's policy",
    _FULL_STATUS: "no space is left there; free some",
}
_MOMENTARY = {"RequestTimeout", "IncompleteBody", "BadDigest", "PreconditionFailed", "ConditionalRequestConflict"}
_MOMENTARY_STATUS = {400, 408, 409, 412, 429}


def in_our_words(error: Exception, url: str, path: str) -> Exception:
    """What a request to the store at `url` raised, as what a store raises. Its text is our own: a server's may quote
    what it was sent."""
    reply = error if isinstance(error, ClientError) else error.__cause__
    if isinstance(reply, ClientError):
        code = reply.response.get("Error", {}).get("Code", "")
        status = reply.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in _REFUSALS:
            return (NoSpace if code in _FULL else StoreRefused)(f"store {url} cannot be used: {_REFUSALS[code]}")
        if status == 404:
            return FileNotFoundError(f"{url} has no {path}")
        if status in _REFUSED_STATUS:
            return (NoSpace if status == _FULL_STATUS else StoreRefused)(
                f"store {url} cannot be used: {_REFUSED_STATUS[status]}"
            )
        if code in _MOMENTARY or status in _MOMENTARY_STATUS or status >= 500:
            return StoreError(f"store {url} failed at {path}: HTTP {status} {code}")
        return StoreRefused(f"store {url} refuses {path}: HTTP {status} {code}")
    if isinstance(error, SSLError):
        return StoreRefused(f"store {url} cannot be used: its certificate is not valid")
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return StoreRefused(f"store {url} cannot be used: there are no keys; {KEYS}")
    if isinstance(error, HTTPClientError | NoConnection | OSError | BrokenConnection | ResponseParserError):
        return StoreError(f"store {url} does not answer at {path}: {type(error).__name__}")
    return StoreRefused(f"store {url} cannot be used: {error}")
