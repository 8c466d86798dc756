"""A stand-in of the Hub on this machine: as much of its HTTP API as huggingface_hub calls to push and to load a model.

    with HubStandIn() as hub:
        api = HfApi(endpoint=hub.url, token=WRITER)

It keeps repositories in memory, with their commits. Xet is not spoken: clients need HF_HUB_DISABLE_XET=1.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

WRITER, READER, OTHER = "hf_writer", "hf_reader", "hf_other"
USERS = {WRITER: ("ada", "write"), READER: ("ada", "read"), OTHER: ("eve", "write")}
ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


@dataclass
class Blob:
    data: bytes
    is_lfs: bool = False

    @property
    def oid(self) -> str:
        """Git's name of the content; LFS names it by SHA-256."""
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclass
class Repo:
    """Branches name commits, and a commit is a mapping of paths to blobs."""

    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, Blob], message: str) -> str:
        name = hashlib.sha1(f"{branch} {len(self.commits)}".encode()).hexdigest()
        self.commits[name], self.branches[branch] = files, name
        self.messages.append(message)
        return name

    def find(self, revision: str) -> str | None:
        name = self.branches.get(revision, revision)
        return name if name in self.commits else None

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return {path: blob.data for path, blob in self.commits[self.find(revision)].items()}


class Refusal(Exception):
    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class HubStandIn:
    """The server. `calls` lists what it was asked for; `broken` maps the beginning of a call to a status to answer."""

    def __init__(self):
        self.repos: dict[str, Repo] = {}
        self.stored: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.broken: dict[str, int] = {}
        handler = type("Handler", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.storage = f"http://localhost:{self.server.server_port}/storage"  # large files come from another host

    def __enter__(self) -> "HubStandIn":
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()

    def make(self, repo_id: str, private: bool = False, **files: bytes) -> Repo:
        """A repository that is already there."""
        repo = self.repos[repo_id] = Repo(private)
        repo.commit("main", {".gitattributes": Blob(ATTRIBUTES)}, "initial commit")
        if files:
            held = {**repo.commits[repo.branches["main"]], **{path: Blob(data) for path, data in files.items()}}
            repo.commit("main", held, "files")
        return repo


class Handler(BaseHTTPRequestHandler):
    hub: HubStandIn
    protocol_version = "HTTP/1.1"
    ROUTES = [
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("GET", r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", "info"),
        ("GET", r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?", "tree"),
        ("POST", r"/api/models/([^/]+/[^/]+)/branch/([^/]+)", "branch"),
        ("POST", r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", "preupload"),
        ("POST", r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", "commit"),
        ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
        ("PUT", r"/storage/([0-9a-f]{64})", "store"),
        ("GET", r"/storage/([0-9a-f]{64})", "fetch"),
        ("GET", r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", "resolve"),
    ]

    def log_message(self, *_) -> None:
        pass

    def answer(self) -> None:
        address = urlsplit(self.path)
        self.body, self.query = self.read_body(), parse_qs(address.query)
        method = "GET" if self.command == "HEAD" else self.command
        self.hub.calls.append(f"{self.command} {address.path}")
        try:
            for start, status in self.hub.broken.items():
                if self.hub.calls[-1].startswith(start):
                    raise Refusal(status, "broken on purpose", "RepoNotFound" if status == 404 else None)
            for wanted, pattern, name in self.ROUTES:
                found = re.fullmatch(pattern, address.path)
                if method == wanted and found:
                    groups = [None if part is None else unquote(part) for part in found.groups()]
                    return getattr(self, name)(*groups)
            raise Refusal(404, "there is nothing here", "EntryNotFound")
        except Refusal as refusal:
            headers = {"X-Error-Message": refusal.message}
            headers |= {"X-Error-Code": refusal.code} if refusal.code else {}
            self.reply(json.dumps({"error": refusal.message}).encode(), refusal.status, headers)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while count := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(count))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def reply(self, body: bytes | dict | list, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def user(self) -> tuple[str, str]:
        """Name and role; a call without a token, or with an unknown one, is refused as the Hub does."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in USERS:
            raise Refusal(
                401, "Invalid credentials in Authorization header" if token else "Invalid username or password."
            )
        return USERS[token]

    def check_write(self, repo_id: str) -> None:
        name, role = self.user()
        if role != "write" or repo_id.split("/")[0] != name:
            raise Refusal(403, f"you have no right to write to {repo_id}")

    def repo(self, repo_id: str) -> Repo:
        found = self.hub.repos.get(repo_id)
        if found is None or (found.private and self.user()[0] != repo_id.split("/")[0]):
            raise Refusal(404, "Repository not found", "RepoNotFound")
        return found

    def at(self, repo_id: str, revision: str) -> tuple[str, dict[str, Blob]]:
        repo = self.repo(repo_id)
        sha = repo.find(revision)
        if sha is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha, repo.commits[sha]

    def whoami(self) -> None:
        name, role = self.user()
        self.reply({"type": "user", "name": name, "orgs": [], "auth": {"accessToken": {"role": role}}})

    def create(self) -> None:
        asked = json.loads(self.body)
        repo_id = f"{asked.get('organization') or self.user()[0]}/{asked['name']}"
        self.check_write(repo_id)
        if repo_id in self.hub.repos:
            url = {"url": f"{self.hub.url}/{repo_id}"}
            return self.reply({"error": "You already created this model repo", **url}, 409)
        self.hub.make(repo_id, private=asked.get("private") or asked.get("visibility") == "private")
        self.reply({"url": f"{self.hub.url}/{repo_id}", "name": repo_id})

    def validate(self) -> None:
        content = json.loads(self.body)["content"]
        found = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
        metadata = yaml.safe_load(found.group(1)) if found else None
        if not isinstance(metadata, dict) or "license" not in metadata:
            return self.reply({"errors": [{"message": "metadata lack a license"}], "warnings": []}, 400)
        self.reply({"errors": [], "warnings": []})

    def info(self, repo_id: str, revision: str | None) -> None:
        sha, files = self.at(repo_id, revision or "main")
        private = self.hub.repos[repo_id].private
        siblings = [{"rfilename": path} for path in sorted(files)]
        self.reply({"id": repo_id, "sha": sha, "private": private, "tags": [], "siblings": siblings})

    def tree(self, repo_id: str, revision: str, folder: str | None) -> None:
        _, files = self.at(repo_id, revision)
        own = {path: blob for path, blob in files.items() if folder is None or path.startswith(f"{folder}/")}
        if folder is not None and not own:
            raise Refusal(404, f"{folder} does not exist", "EntryNotFound")
        self.reply([self.entry(path, blob) for path, blob in sorted(own.items())])

    def entry(self, path: str, blob: Blob) -> dict:
        lfs = {"lfs": {"oid": blob.sha256, "size": len(blob.data), "pointerSize": 130}} if blob.is_lfs else {}
        return {"type": "file", "path": path, "size": len(blob.data), "oid": blob.oid, **lfs}

    def branch(self, repo_id: str, name: str) -> None:
        self.check_write(repo_id)
        repo = self.repo(repo_id)
        if name in repo.branches:
            raise Refusal(409, "the branch is there")
        repo.branches[name] = repo.branches["main"]
        self.reply({})

    def preupload(self, repo_id: str, revision: str) -> None:
        self.check_write(repo_id)
        _, files = self.at(repo_id, revision)
        found = []
        for asked in json.loads(self.body)["files"]:
            mode = "lfs" if asked["path"].endswith(".safetensors") or asked["size"] > 10 * 2**20 else "regular"
            known = files.get(asked["path"])
            oid = None if known is None else known.sha256 if known.is_lfs else known.oid
            found.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.reply({"files": found})

    def batch(self, repo_id: str) -> None:
        self.check_write(repo_id)
        objects = []
        for asked in json.loads(self.body)["objects"]:
            upload = {"actions": {"upload": {"href": f"{self.hub.storage}/{asked['oid']}"}}}
            objects.append({**asked, **({} if asked["oid"] in self.hub.stored else upload)})
        self.reply({"transfer": "basic", "objects": objects})

    def store(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refusal(400, "the content is not what its name says")
        self.hub.stored[oid] = self.body
        self.reply(b"")

    def fetch(self, oid: str) -> None:
        self.reply(self.hub.stored[oid], headers={"ETag": f'"{oid}"'})

    def commit(self, repo_id: str, revision: str) -> None:
        self.check_write(repo_id)
        sha, before = self.at(repo_id, revision)
        header, *changes = [json.loads(line) for line in self.body.splitlines()]
        if header["value"].get("parentCommit", sha) != sha:
            raise Refusal(412, "a commit has happened since")
        files = dict(before)
        for change in changes:
            value = change["value"]
            if change["key"] == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]))
            elif change["key"] == "lfsFile":
                if value["oid"] not in self.hub.stored:
                    raise Refusal(400, f"{value['path']} was not uploaded")
                files[value["path"]] = Blob(self.hub.stored[value["oid"]], is_lfs=True)
            else:
                del files[value["path"]]
        name = self.repo(repo_id).commit(revision, files, header["value"]["summary"])
        self.reply({"success": True, "commitOid": name, "commitUrl": f"{self.hub.url}/{repo_id}/commit/{name}"})

    def resolve(self, repo_id: str, revision: str, path: str) -> None:
        sha, files = self.at(repo_id, revision)
        headers = {"X-Repo-Commit": sha}
        if path not in files:
            raise Refusal(404, f"{path} does not exist", "EntryNotFound")
        blob = files[path]
        if not blob.is_lfs:
            return self.reply(blob.data, headers={**headers, "ETag": f'"{blob.oid}"'})
        linked = {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.data))}
        self.reply(b"", 302, {**headers, **linked, "Location": f"{self.hub.storage}/{blob.sha256}"})
