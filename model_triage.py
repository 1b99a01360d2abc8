"""The systems under test: the inbox-triage prompt, sent to a model.

    model_triage:embedded                           a small sampled model in plain Python, no server needed
    model_triage:gemma, model_triage:qwen           two pinned models on Ollama
    model_triage:ollama=TAG                         any model that is installed on Ollama
    model_triage:openai=NAME --endpoint URL         any OpenAI-compatible server

A key in BENCH_API_KEY is sent as a bearer token, and shows up nowhere. OLLAMA_HOST is read as Ollama reads it.
Every way in which a reply can go wrong has one name, an exception class here. Blank or missing input raises
ValueError before any model is asked.
"""
import hashlib
import http.client
import io
import json
import math
import os
import random
import re
import socket
import time
import urllib.parse
from functools import cached_property

import harness
from harness import Answer, Busy, RunError, Unavailable
from triage_task import CATEGORIES, SCHEMA

SET_BY_THE_BENCH = {"model", "messages", "stream", "seed", "temperature", "max_tokens", "num_predict", "top_p", "think",
                    "truncate"}
MAX_BODY = 16 * 2**20    # bytes of a server's answer that are read
ALIVE_TIMEOUT_S = 5
KEY_SHOWN = "[BENCH_API_KEY]"
SECRET_LENGTH = 8    # a shorter key is a placeholder, and may be any word of a reply: it is masked in errors alone

PROMPT_TEXT = (
    "You sort the inbox of an online shop. Read the customer's message and answer with JSON only: "
    '{"category": "billing" | "delivery" | "account" | "other", "needs_human": true | false}. '
    "billing: charges, refunds, invoices. delivery: parcels, tracking, delays. account: login, password, security. "
    "other: everything else. needs_human is true when a person must look into the matter, "
    "and false when a standard answer is enough."
)
PROMPT = {"name": "inbox-triage", "sha256": hashlib.sha256(PROMPT_TEXT.encode()).hexdigest()}


class ReplyError(Exception):
    """The model was asked and gave no usable answer. `text` is what came back, `metadata` what is known of
    it, `status` the HTTP status where that is the fault."""

    def __init__(self, message, text=None, status=None):
        super().__init__(message)
        self.text, self.status, self.metadata = text, status, None


class RefusedReply(ReplyError):
    """The model or a content filter refused to answer."""


class UnfinishedReply(ReplyError):
    """The server ended the reply without finishing it."""


class TruncatedReply(ReplyError):
    """The reply was cut off at the token limit."""


class EmptyReply(ReplyError):
    """The reply has no content."""


class MalformedReply(ReplyError):
    """What came back is not the API's shape, too large, or no JSON."""


class ReplyTimeout(ReplyError):
    """The whole call took longer than it may."""


class ConnectionCut(ReplyError):
    """The connection was lost after the request was sent."""


class ServerError(ReplyError):
    """The server failed (5xx)."""


class BadRequest(ReplyError):
    """The server refused the request (4xx), or sent it elsewhere (3xx)."""


def message_of(case):
    """Return the case's message, or its JSON where it is no text. Raises ValueError where it is blank or missing."""
    message = case["input"]
    if message is None or isinstance(message, str) and not message.strip():
        raise ValueError("the message is blank or missing")
    return message if isinstance(message, str) else json.dumps(message, ensure_ascii=False)


# --- the embedded model -----------------------------------------------------------------------------------

class EmbeddedSystem:
    """A stand-in for trying the tool with no server: weighted words, a softmax, a seeded draw.

    It is a sampled model, so the same case can pass on one trial and fail on the next, but its weights were
    set by hand: its results say nothing about any other model.
    """

    WORDS = {
        "billing": {"charged": 3, "payments": 3, "card": 2, "refund": 4, "money": 2, "fee": 2.5, "invoice": 3,
                    "pay": 1.5},
        "delivery": {"parcel": 4, "tracking": 3, "carrier": 2, "order": 1.5, "promised": 1, "come": 1},
        "account": {"account": 2.5, "password": 4, "log": 2, "closed": 2, "login": 3},
        "other": {"which": 2, "better": 2, "lamps": 1.5, "oak": 1},
    }
    HUMAN = {"please": 1, "back": 2, "not": 1.5, "still": 2, "want": 1, "cannot": 2.5, "my": 0.5, "find": 0.5,
             "where": -3, "which": -3}
    name, version, mode, model, tools = "embedded-triage", "1", "live", "weighted-words", []
    prompt = {"name": "word-weights", "sha256": harness.sha256_json([WORDS, HUMAN])}
    sampling = {"temperature": 1.0, "seed_base": harness.SEED_BASE}

    def respond(self, case, trial):
        """Draw an answer. Raises ValueError for a blank or missing message."""
        message, seed = message_of(case), harness.SEED_BASE + trial
        words = re.findall(r"[a-z]+", message.lower())
        draw = random.Random(f"{seed}:{message}".encode("utf-8", "backslashreplace"))
        temperature = self.sampling["temperature"]
        scores = [sum(self.WORDS[category].get(word, 0) for word in words) for category in CATEGORIES]
        weights = [math.exp((score - max(scores)) / temperature) for score in scores]
        category = draw.choices(CATEGORIES, weights)[0]
        human = sum(self.HUMAN.get(word, 0) for word in words) - 1
        needs_human = draw.random() < 1 / (1 + math.exp(min(-human / temperature, 700)))    # beyond that it overflows
        return Answer({"category": category, "needs_human": needs_human}, {"seed": seed, "temperature": temperature})


# --- HTTP -------------------------------------------------------------------------------------------------

class _TimedRaw(io.RawIOBase):
    """The bytes of a socket until a deadline, however slowly they come."""

    def __init__(self, sock, deadline):
        self.sock, self.deadline = sock, deadline

    def readable(self):
        return True

    def readinto(self, buffer):
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.sock.settimeout(left)
        return self.sock.recv_into(buffer)

    def makefile(self, mode):
        """What an HTTPResponse asks its socket for."""
        return io.BufferedReader(self)


class Server:
    """A model's server: JSON over HTTP, on connections that are kept open, bounded in time and size."""

    def __init__(self, endpoint, timeout_s, start_hint):
        """`endpoint` is an http or https URL. Raises RunError for any other, and for a key that cannot be sent."""
        self.timeout_s, self.start_hint = timeout_s, start_hint
        self.idle = []    # connections that are open and not in use
        try:
            if "@" in endpoint:    # wherever it stands: a password may hold what ends a host name, and is never shown
                raise RunError("the endpoint has a user name or password in it; take it out, and put the server's key "
                               "into BENCH_API_KEY")
            parts = urllib.parse.urlsplit(endpoint)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment \
                    or re.search(r"[\s\x00-\x1f]", endpoint):
                raise ValueError("it is not http://HOST or https://HOST with, if need be, a port and a path")
            self.secure = parts.scheme == "https"
            self.port = parts.port if parts.port is not None else 443 if self.secure else 80
            host = parts.hostname.encode("idna").decode()
        except ValueError as error:
            raise RunError(f"endpoint {endpoint.partition('?')[0]}: {error}") from None
        self.endpoint = endpoint
        # A server that listens on every address is asked on this machine's own.
        self.host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        bare = f"[{self.host}]" if ":" in self.host else self.host
        self.host_header = bare if self.port == (443 if self.secure else 80) else f"{bare}:{self.port}"
        self.path = urllib.parse.quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
        self.key = os.environ.get("BENCH_API_KEY", "").strip()
        if not (self.key.isascii() and (self.key + "x").isprintable()):
            raise RunError("BENCH_API_KEY holds a character that no HTTP header can carry")
        as_json = json.dumps(self.key)[1:-1]
        self.key_forms = (self.key, as_json, as_json.replace("/", "\\/"))    # as a server may send it back

    @cached_property
    def proxy(self):
        """The proxy's URL, split, or None. This machine itself is never asked through one."""
        if _is_loopback(self.host):
            return None
        import urllib.request
        proxies = urllib.request.getproxies()
        url = proxies.get("https" if self.secure else "http") or proxies.get("all")
        if not url or urllib.request.proxy_bypass(_netloc(self.host, self.port)):
            return None
        try:
            parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
            if parts.scheme == "http" and parts.hostname and parts.port != 0:
                return parts
        except ValueError:    # which would show the password in it
            pass
        raise RunError(f"the proxy for {self.endpoint} is not http://HOST:PORT, and no other kind is known")

    def _connection(self, deadline):
        """Return an idle connection that the server has not closed meanwhile, or a new one."""
        while self.idle:
            connection = self.idle.pop()
            if not _readable(connection.sock):
                return connection
            connection.close()
        host, port = (self.proxy.hostname, self.proxy.port or 80) if self.proxy else (self.host, self.port)
        connection = None
        try:
            addresses = len(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
            limit = max(0.001, deadline - time.monotonic()) / addresses
            connection = http.client.HTTPConnection(host, port, timeout=limit)
            connection.response_class = lambda sock, **how: http.client.HTTPResponse(_TimedRaw(sock, deadline), **how)
            if self.proxy and self.secure:
                connection.set_tunnel(self.host, self.port, self._proxy_headers())
            connection.connect()
            if self.secure:    # the handshake is part of the call's time, through a proxy too
                import ssl
                connection.sock.settimeout(max(0.001, deadline - time.monotonic()))
                connection.sock = ssl.create_default_context().wrap_socket(connection.sock, server_hostname=self.host)
        except (OSError, ValueError, http.client.HTTPException) as error:    # ValueError: no name that can be looked up
            if connection is not None:
                connection.close()
            raise Unavailable(f"{self.endpoint} cannot be reached: {_reason(error)}; {self.start_hint}") from None
        return connection

    def close(self):
        """Close the idle connections."""
        while self.idle:
            self.idle.pop().close()

    def _proxy_headers(self):
        if not (self.proxy and self.proxy.username):
            return {}
        import base64
        pair = f"{urllib.parse.unquote(self.proxy.username)}:{urllib.parse.unquote(self.proxy.password or '')}"
        return {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}

    def _request(self, method, path, body):
        """Return a request's bytes. In one piece: http.client sends head and body apart, which takes twice as long."""
        url, headers = self.path + path, {"Host": self.host_header, "Accept": "application/json", "Accept-Encoding": "identity"}
        content = b"" if body is None else harness.encode(body)
        if body is not None:
            headers |= {"Content-Type": "application/json", "Content-Length": len(content)}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        if self.proxy and not self.secure:
            url, headers = f"http://{_netloc(self.host, self.port)}{url}", headers | self._proxy_headers()
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"{method} {url} HTTP/1.1\r\n{lines}\r\n".encode("ascii") + content

    def ask(self, method, path, body=None, timeout_s=None):
        """Return (value, name that the server gives itself or None) of a JSON answer with a 2xx status.

        Raises Unavailable or Busy where the model was not asked, and the ReplyError that fits where it was.
        """
        timeout_s = timeout_s or self.timeout_s
        deadline = time.monotonic() + timeout_s
        request = self._request(method, path, body)
        connection, data = self._connection(deadline), bytearray()
        response = http.client.HTTPResponse(_TimedRaw(connection.sock, deadline), method=method)
        try:
            connection.sock.settimeout(max(0.001, deadline - time.monotonic()))
            unsent = None
            try:
                connection.sock.sendall(request)
            except TimeoutError:
                raise
            except OSError as error:    # it may have answered before it had read everything
                unsent = error
            try:
                response.begin()
            except (OSError, http.client.HTTPException):
                if unsent is None:
                    raise
                raise Unavailable(f"{self.endpoint} took no request: {_reason(unsent)}; {self.start_hint}") from None
            while len(data) <= MAX_BODY and (piece := response.read1(2 ** 16)):
                data += piece
            if len(data) > MAX_BODY:
                raise MalformedReply(f"the answer of {self.endpoint} is larger than {MAX_BODY} bytes")
            if response.length:
                raise ConnectionCut(f"the connection to {self.endpoint} was lost in the middle of the answer")
            value = self._judge(response.status, response.headers, data)
        except BaseException as error:
            connection.close()
            named = self._named(error, timeout_s)
            if isinstance(named, ReplyError) and named.text is None and data:
                named.text = self.shown(data)
            raise named from None
        finally:
            response.close()
        if response.will_close:
            connection.close()
        else:
            self.idle.append(connection)
        return value, self.shown(response.headers.get("Server") or "") or None

    def _judge(self, status, headers, data):
        """Return the JSON value of an answer, or raise what its status means."""
        if 200 <= status < 300:
            try:
                return self.masked(harness.parse_json(data.decode("utf-8")))
            except ValueError as error:
                raise MalformedReply(f"the answer is not JSON: {error}") from None
        said = f"{self.endpoint} answered {status}: {self.shown(server_message(self.shown(data)))[:500]}"
        if status in (401, 403):
            raise Denied(f"{said}; is the right key in BENCH_API_KEY?")
        if status == 407:
            raise Denied(f"{said}; the proxy wants a user name and a password")
        if status == 404:    # no such model, or no such API: nothing was asked either way
            raise NotFound(said)
        if status in (429, 503):
            raise Busy(said, retry_after(headers))
        if not 300 <= status < 600:
            raise MalformedReply(said)
        if status < 400:
            target = self.shown(headers.get("Location") or "nowhere")
            said = f"{self.endpoint} answered {status}, a redirect to {target}; it is not followed: name that server " \
                   "as the endpoint"
        raise (BadRequest if status < 500 else ServerError)(said, status=status)

    def _named(self, error, timeout_s):
        """Return the error that names what went wrong after a request was sent."""
        if isinstance(error, TimeoutError):
            return ReplyTimeout(f"no whole answer from {self.endpoint} within {timeout_s:g} s")
        if isinstance(error, (OSError, http.client.IncompleteRead)):
            return ConnectionCut(f"the connection to {self.endpoint} was lost before the whole answer came: "
                                 + self.shown(_reason(error)))
        if isinstance(error, (http.client.HTTPException, ValueError)):
            return MalformedReply(f"the answer of {self.endpoint} is not HTTP: {type(error).__name__}: "
                                  + self.shown(str(error)))
        return error

    def shown(self, answer, shortest=3):
        """Return an answer (bytes or text) as text, without the key, of `shortest` characters at least, that a server
        may have sent back."""
        text = answer if isinstance(answer, str) else answer.decode("utf-8", "replace")
        for key in self.key_forms if len(self.key) >= shortest else ():
            text = text.replace(key, KEY_SHOWN)
        return text

    def masked(self, value):
        """Return a JSON value in which no string holds the key."""
        if len(self.key) < SECRET_LENGTH:
            return value
        if isinstance(value, str):
            return self.shown(value, SECRET_LENGTH)
        if isinstance(value, list):
            return [self.masked(item) for item in value]
        return {self.masked(key): self.masked(item) for key, item in value.items()} if isinstance(value, dict) else value


class NotFound(Unavailable):
    """The server is there and has no such model, or no such API (404)."""


class Denied(Unavailable):
    """The server, or a proxy before it, is there and does not let us in (401, 403, 407)."""


def _netloc(host, port):
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(host):
    """True for a name or address of this machine itself, however it is written."""
    import ipaddress
    host = host.rstrip(".").lower()
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            address = ipaddress.ip_address(socket.inet_aton(host))    # 127.1 and the like
        except OSError:
            return host in ("localhost", "ip6-localhost") or host.endswith(".localhost")
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def _readable(sock):
    """True if an idle connection has something to read: the server has closed it (or talks out of turn)."""
    import select
    if not hasattr(select, "poll"):
        return bool(select.select([sock], [], [], 0)[0])
    poll = select.poll()    # select() stops at 1024 open files
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _reason(error):
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def server_message(text):
    """Return a server's own words from an error's body: `error`, `message` or `detail`, at whatever depth of
    objects, lists and of JSON inside strings, or the body itself."""
    text = text.strip()
    for _ in range(6):
        try:
            value = harness.parse_json(text)
        except ValueError:
            break
        while isinstance(value, (dict, list)):
            inner = value[:1] if isinstance(value, list) else [value[key] for key in (
                "error", "message", "detail", "msg") if value.get(key)]
            value = inner[0] if inner else json.dumps(value)
        text = value if isinstance(value, str) else json.dumps(value)
        if not isinstance(value, str):
            break
    return text or "(no message)"


def retry_after(headers):
    """Return the seconds in a Retry-After header, given as a number or a date, or None."""
    value = headers.get("Retry-After", "").strip()
    if value.isascii() and value.isdigit():
        return int(value[:9])
    if value:
        from email.utils import parsedate_to_datetime
        try:
            return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
        except (TypeError, ValueError, OverflowError):
            pass
    return None


# --- chat systems -----------------------------------------------------------------------------------------

class ChatSystem:
    """The triage prompt on a chat server. A subclass says how its API is asked and read."""

    version, mode, tools, prompt = "1", "live", [], PROMPT
    settable = ("endpoint", "timeout_s")    # where it is reached and how patiently: no part of its identity
    server = None    # the server's name and version, once it was asked

    def __init__(self, name, model, endpoint=None, timeout_s=120, temperature=1.0, max_tokens=64, top_p=None,
                 format="schema", extra_body=None):
        """`format` is how the reply's form is asked for: the task's "schema", "json" or "none". `extra_body` is
        an object merged into each request. Raises RunError where it would set what the bench itself sets."""
        self.name, self.asked_model, self.endpoint, self.timeout_s = name, model, endpoint, timeout_s
        self.sampling = {"api": self.API, "temperature": temperature, "max_tokens": max_tokens, "top_p": top_p,
                         "format": format, "extra_body": extra_body, "seed_base": harness.SEED_BASE}
        extra = extra_body or {}
        inner = extra.get("options", {})
        if not isinstance(inner, dict):
            raise RunError("the extra body's `options` must be an object")
        if extra.get("max_tokens", ...) is None:    # taken out, for servers that want the limit under another name
            extra = {key: value for key, value in extra.items() if key != "max_tokens"}
        fixed = SET_BY_THE_BENCH if format == "none" else SET_BY_THE_BENCH | {"format", "response_format"}
        if taken := sorted(fixed & (set(extra) | set(inner))):
            raise RunError(f"the extra body sets {', '.join(taken)}; that has an option of its own, or the bench sets it")

    @cached_property
    def http(self):
        """The server. Made when it is first needed, since making it can fail."""
        return Server(self.endpoint, self.timeout_s, self.START_HINT)

    def request(self, case, trial):
        """Return the body of a trial's request. Raises ValueError for a blank or missing message."""
        messages = [{"role": "system", "content": PROMPT_TEXT}, {"role": "user", "content": message_of(case)}]
        return _merged(self.body(messages, harness.SEED_BASE + trial), self.sampling["extra_body"] or {})

    def respond(self, case, trial):
        """Ask the model once. Raises ValueError for a blank or missing message, Unavailable or Busy where the
        model was not asked, and json.JSONDecodeError or a ReplyError where it gave no usable answer."""
        body = self.request(case, trial)
        metadata = {"seed": harness.SEED_BASE + trial, "temperature": self.sampling["temperature"]}
        try:
            value, _ = self.http.ask("POST", self.PATH, body)
            text = self.content(value, metadata)
        except ReplyError as error:
            error.metadata = metadata
            raise
        try:
            return Answer(self.http.masked(harness.parse_json(text)), metadata)
        except json.JSONDecodeError as error:
            error.text, error.metadata = text, metadata
            raise

    def content(self, value, metadata):
        """Return the text of a reply, and put what it says of itself into `metadata`. Raises the ReplyError that
        fits; where several do, the first of: refused, unfinished, truncated, empty."""
        try:
            text, thinking, refusal, stop_reason = self.parts(value, metadata)
            if not (stop_reason is None or isinstance(stop_reason, str)):
                raise TypeError(f"the stop reason is {type(stop_reason).__name__}")
        except (TypeError, LookupError, AttributeError) as error:
            raise MalformedReply(f"the answer is not the API's shape: {type(error).__name__}: {error}",
                                 json.dumps(value, ensure_ascii=False)) from None
        metadata["stop_reason"] = stop_reason
        into_thinking = ": the tokens went into thinking" if thinking and not text.strip() else ""
        received = text if text.strip() else thinking or text
        if refusal or stop_reason == "content_filter":
            raise RefusedReply(f"the model refused: {refusal or 'content filter'}", received)
        if stop_reason is None:
            raise UnfinishedReply("the server ended the reply without finishing it", received)
        if stop_reason == "length":
            raise TruncatedReply(f"cut off at the token limit{into_thinking}", received)
        if not text.strip():
            raise EmptyReply(f"the reply has no content{into_thinking}", received)
        return text

    def warm_up(self):
        """Have the server load the model, so that loading is in no trial's latency. Raises Busy while it loads
        for longer than a call may take, and RunError where it says that it cannot."""
        try:
            self.http.ask("POST", self.PATH, self.loading())
        except ReplyTimeout:
            raise Busy(f"{self.endpoint} is still loading {self.asked_model}") from None
        except ReplyError as error:
            raise RunError(f"{self.asked_model} did not warm up: {error} (--no-warmup goes on without)") from None

    def close(self):
        """Close the connections to the server."""
        if "http" in self.__dict__:
            self.http.close()

    def alive(self):
        """True if the server answers, whatever it says."""
        try:
            self.http.ask("GET", self.ALIVE_PATH, timeout_s=ALIVE_TIMEOUT_S)
        except (Unavailable, Busy, ReplyError) as error:
            if getattr(error, "status", None) in (502, 504):    # a gateway's word for a server behind it that is gone
                return False
            return not isinstance(error, (Unavailable, ReplyTimeout, ConnectionCut)) or isinstance(error, (NotFound, Denied))
        return True


def _string(value):
    """Return a reply's text field, where missing text is empty and a list of parts is put together. Raises
    TypeError, LookupError or AttributeError for anything else."""
    if isinstance(value, list):
        return "".join(part["text"] for part in value if part.get("type") == "text")
    if not (value is None or isinstance(value, str)):
        raise TypeError(f"a text is {type(value).__name__}")
    return value or ""


def _object(value):
    return value if isinstance(value, dict) else {}


def _seconds(measured, **fields):
    """Return what a server measured, in seconds: `fields` maps a name to (the server's field, units a second)."""
    return {name: round(float(measured[field]) / units, 9) for name, (field, units) in fields.items()
            if isinstance(measured.get(field), (int, float)) and 0 <= measured[field] < 1e18}


def _merged(body, extra):
    """Return a request's body with the keys of `extra`: an object in both (Ollama's options) is merged too, and a
    null takes the key out."""
    merged = body | {key: body[key] | value if isinstance(value, dict) and isinstance(body.get(key), dict) else value
                     for key, value in extra.items()}
    return {key: value for key, value in merged.items() if value is not None}


def _keep(metadata, **said):
    """Keep what a server said of a reply. A number that it did not give is missing, never zero, and what is of the
    wrong type spoils no answer."""
    kinds = {"model": str, "server": str}
    metadata |= {key: value for key, value in said.items()
                 if isinstance(value, kinds.get(key, (int, float))) and not isinstance(value, bool)}


class OllamaSystem(ChatSystem):
    """A model on Ollama's own API. With a pinned digest it runs that model and no other; without one, the
    digest of what is installed is looked up and becomes part of the identity."""

    API, PATH, ALIVE_PATH = "ollama", "/api/chat", "/api/version"
    START_HINT = "start it with `ollama serve`, or name it with --endpoint"

    def __init__(self, name, tag, digest=None, endpoint=None, think="off", **options):
        super().__init__(name, tag, endpoint or ollama_endpoint(os.environ.get("OLLAMA_HOST", "")), **options)
        self.digest = digest
        self.sampling |= {"think": think == "on", "truncate": False}

    @cached_property
    def model(self):
        return f"{self.asked_model}@{self.digest or self.installed_digest()}"

    def installed_digest(self):
        """Return the first 12 hex digits of the installed model's digest. Raises RunError where there is none."""
        try:
            value, _ = self.http.ask("GET", "/api/tags")
        except ReplyError as error:
            raise RunError(str(error)) from None
        try:
            installed = {model["name"]: model["digest"].removeprefix("sha256:")[:12] for model in value["models"]}
        except (TypeError, LookupError, AttributeError):
            raise RunError(f"{self.endpoint} does not answer /api/tags as Ollama does") from None
        tag = self.asked_model if ":" in self.asked_model.rpartition("/")[2] else f"{self.asked_model}:latest"
        if tag not in installed:
            raise RunError(f"{tag} is not installed at {self.endpoint} (it has {harness.some(installed, 12)}); "
                           f"run `ollama pull {tag}`")
        return installed[tag]

    def check_model(self):
        """Raises RunError where the model is not installed or not at the digest of the system's identity."""
        installed, wanted = self.installed_digest(), self.model.rpartition("@")[2]
        if installed != wanted:
            raise RunError(f"{self.asked_model} at {self.endpoint} has the digest {installed}, not {wanted}; "
                           f"model_triage:ollama={self.asked_model} runs what is installed")
        try:
            self.server = f"ollama {self.http.ask('GET', '/api/version')[0]['version']}"
        except (ReplyError, NotFound, TypeError, LookupError):    # it only describes
            pass

    def body(self, messages, seed):
        """Return the body of a chat request. (`_merged` takes out a key without a value.)"""
        sampling = self.sampling
        options = {"temperature": sampling["temperature"], "num_predict": sampling["max_tokens"], "seed": seed}
        if sampling["top_p"] is not None:
            options["top_p"] = sampling["top_p"]
        form = {"schema": SCHEMA, "json": "json", "none": None}[sampling["format"]]
        return {"model": self.asked_model, "messages": messages, "stream": False, "think": sampling["think"],
                "truncate": False, "format": form, "options": options}

    def loading(self):
        """Return the body of the request that only loads the model, with the options that it will be used with."""
        body = _merged(self.body([], harness.SEED_BASE), self.sampling["extra_body"] or {})
        return {key: body[key] for key in ("model", "messages", "stream", "options", "keep_alive") if key in body}

    def parts(self, value, metadata):
        """Return (text, thinking, refusal, stop reason) of a chat reply."""
        _keep(metadata, model=value.get("model"), server=self.server, tokens_in=value.get("prompt_eval_count"),
              tokens_out=value.get("eval_count"), **_seconds(value, load_s=("load_duration", 1e9), prompt_s=(
                  "prompt_eval_duration", 1e9), generation_s=("eval_duration", 1e9)))
        message = value["message"]
        stop_reason = value.get("done_reason") if value["done"] else None
        return _string(message.get("content")), _string(message.get("thinking")), "", stop_reason


class OpenAISystem(ChatSystem):
    """A model on an OpenAI-compatible server."""

    API, PATH, ALIVE_PATH = "openai", "/v1/chat/completions", "/v1/models"
    START_HINT = "start the model's server, or name it with --endpoint URL"

    def __init__(self, name, model, endpoint=None, **options):
        if not endpoint:
            raise RunError(f"model_triage:openai={model} needs --endpoint URL")
        if endpoint.rstrip("/").endswith("/chat/completions"):
            raise RunError(f"endpoint {endpoint} is the API's address; name the server's base, which ends in /v1 or before")
        super().__init__(name, model, endpoint.rstrip("/").removesuffix("/v1"), **options)
        self.model = model

    def check_model(self):
        """Raises RunError where the server lists its models and this one is not among them."""
        try:
            value, self.server = self.http.ask("GET", "/v1/models")
        except (NotFound, ServerError, MalformedReply):    # not every server lists its models
            return
        except ReplyError as error:
            if isinstance(error, BadRequest) and error.status >= 400:
                return
            raise RunError(str(error)) from None
        try:
            served = [model["id"] for model in value["data"]]
        except (TypeError, LookupError):
            return
        if self.model not in served:
            raise RunError(f"{self.endpoint} does not serve {self.model}; it serves {harness.some(served, 12)}")

    def body(self, messages, seed):
        """Return the body of a chat completion request. (`_merged` takes out a key without a value.)"""
        sampling = self.sampling
        schema = {"type": "json_schema", "json_schema": {"name": "triage", "strict": True, "schema": SCHEMA}}
        form = {"schema": schema, "json": {"type": "json_object"}, "none": None}[sampling["format"]]
        return {"model": self.model, "messages": messages, "temperature": sampling["temperature"],
                "top_p": sampling["top_p"], "max_tokens": sampling["max_tokens"], "seed": seed, "response_format": form}

    def loading(self):
        """Return the body of a request for one token: with the rest of a trial's, so that what the server
        refuses shows before the first trial."""
        messages = [{"role": "system", "content": PROMPT_TEXT}, {"role": "user", "content": "Hello"}]
        body = _merged(self.body(messages, harness.SEED_BASE), self.sampling["extra_body"] or {})
        return body | {"max_tokens" if "max_tokens" in body else "max_completion_tokens": 1}

    def parts(self, value, metadata):
        """Return (text, thinking, refusal, stop reason) of a chat completion."""
        usage, timings = _object(value.get("usage")), _object(value.get("timings"))
        if usage.get("prompt_tokens"):    # all zero where the server did not count
            _keep(metadata, tokens_in=usage["prompt_tokens"], tokens_out=usage.get("completion_tokens"))
        _keep(metadata, server=self.server)
        _keep(metadata, model=value.get("model"), server=value.get("system_fingerprint"), **_seconds(
            timings, prompt_s=("prompt_ms", 1e3), generation_s=("predicted_ms", 1e3)))
        choice = value["choices"][0]
        message = choice["message"]
        thinking, refusal = message.get("reasoning_content") or message.get("reasoning"), message.get("refusal")
        return (_string(message.get("content")), _string(thinking), refusal if isinstance(refusal, str) else "",
                choice.get("finish_reason"))


def ollama_endpoint(host):
    """Return the URL that OLLAMA_HOST names, read as Ollama reads it: HOST, HOST:PORT, :PORT, an IPv6 address
    bare or in brackets, with or without a scheme and a path. (One with a password in it is refused later, as it is.)"""
    if "@" in host:
        return host
    scheme, given, rest = host.strip().strip("\"'").partition("://")
    scheme, rest = (scheme.lower(), rest) if given else ("http", scheme)
    default_port = {"http": 80, "https": 443}.get(scheme, 11434) if given else 11434
    address, slash, path = rest.partition("/")
    name, colon, port = address.rpartition(":")
    if not colon or "]" in port or (":" in name and not name.endswith("]")):    # no port: a bare IPv6 address has none
        name, port = address, ""
    name = name.strip("[]") or "127.0.0.1"
    number = port if port.isascii() and port.isdigit() and int(port) < 65536 else default_port
    return f"{scheme}://{_netloc(name, number)}{slash}{path}"


def ollama(tag, **options):
    """Return the system of any model that is installed on Ollama."""
    return OllamaSystem(f"model-triage-{tag.lower()}", tag, **options)


def openai(model, **options):
    """Return the system of a model on an OpenAI-compatible server, which `endpoint` names. Raises RunError for
    `think`, which has no common name there."""
    if "think" in options:
        raise RunError("--think is for Ollama; use --extra-body for what this server calls it")
    return OpenAISystem(f"model-triage-{model.lower()}", model, **options)


embedded = EmbeddedSystem()
gemma = OllamaSystem("model-triage-gemma4", "gemma4:e2b", "b37049369adf")
qwen = OllamaSystem("model-triage-qwen3.5", "qwen3.5:0.8b", "de63045f2975")
