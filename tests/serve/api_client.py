"""The official clients, connected to tests/tools/api_tool.cpp in place of a server: any chat template, any
output of the model, and the prompt that the model would get."""

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai

ROOT = Path(__file__).resolve().parents[2]
TOOL = Path(os.environ.get("BOUGH_BUILD_DIR", ROOT / "build")) / "bin" / "api_tool"


@dataclass
class Api:
    """`output` is what the model writes next. `prompts` has the prompts of all answered requests."""

    template: str
    tool_call_parser: str = "auto"
    reasoning_parser: str = ""
    output: str = ""
    prompts: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.process = subprocess.Popen(
            [TOOL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        http = httpx2.Client(transport=httpx2.MockTransport(self._answer))
        options = {"api_key": "any", "max_retries": 0, "http_client": http}
        self.openai = openai.OpenAI(base_url="http://test/v1", **options)
        self.anthropic = anthropic.Anthropic(base_url="http://test", **options)

    def __enter__(self) -> "Api":
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        request |= {
            "template": self.template,
            "tool_call_parser": self.tool_call_parser,
            "reasoning_parser": self.reasoning_parser,
        }
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def parser(self) -> str:
        return self.ask(parser_of=True)["tool_call_parser"]

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Sends a body that no client would send."""
        answer = self.ask(path=path, body=body, output=self.output)
        if "prompt" in answer:
            self.prompts.append(answer["prompt"])
        return answer["status"], json.loads(answer["body"])

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        body = json.loads(request.content)
        answer = self.ask(path=request.url.path, body=body, output=self.output)
        if "prompt" in answer:
            self.prompts.append(answer["prompt"])
        is_stream = body.get("stream") and answer["status"] == 200
        kind = "text/event-stream" if is_stream else "application/json"
        return httpx2.Response(answer["status"], text=answer["body"], headers={"content-type": kind})
