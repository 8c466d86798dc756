"""`transformers serve`, told about Titans, answers an OpenAI-style chat request on loopback."""

import json
import os
import socket
import subprocess
import sys
import time
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

import pytest
import torch
from support import save_chat_model
from transformers import AutoModelForCausalLM, AutoTokenizer

for package in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(package, reason=f"{package} is not installed (pip install transformers[serving])")

CHAT = [{"role": "user", "content": "What do you remember?"}]


def ask(url: str, body: dict | None = None) -> dict:
    request = Request(url, data=body and json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    with build_opener(ProxyHandler({})).open(request, timeout=60) as answer:
        return json.loads(answer.read())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_chat_model(folder, "mac")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "titans_hf", "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(
            [*command, "--device", "cpu"], stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        for _ in range(120):
            assert process.poll() is None, (folder / "server.log").read_text()[-3000:]
            try:
                ask(f"http://127.0.0.1:{port}/health")
                break
            except (URLError, ConnectionError):
                time.sleep(1)
        yield folder, f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(30)


def test_a_chat_request_is_answered_with_what_generate_writes(server):
    folder, url = server
    settings = {"max_tokens": 8, "temperature": 0}
    answer = ask(f"{url}/chat/completions", {"model": str(folder), "messages": CHAT, **settings})
    tokenizer, model = (auto.from_pretrained(folder) for auto in (AutoTokenizer, AutoModelForCausalLM))
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        expected = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert answer["choices"][0]["message"]["content"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert answer["usage"]["completion_tokens"] == 8
