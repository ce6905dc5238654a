"""What a person sees when everything is up: enough to have a first conversation by pasting."""

import json
import shlex
import sys
from pathlib import Path

from cli.demo_access import DEMO_FILE, DemoAccess
from cli.processes import headrace

QUESTION = "What is photosynthesis?"
TEMPERATURE = 0


def ready_block(access: DemoAccess, model: str, data_dir: Path) -> str:
    """Base URL, key, a curl that streams and a Python program that streams."""
    messages = [{"role": "user", "content": QUESTION}]
    body = json.dumps(
        {"model": model, "stream": True, "temperature": TEMPERATURE, "messages": messages}
    )
    return f"""
Headrace is ready. Ctrl-C stops it.

  Base URL  {access.base_url}
  API key   {access.api_key}
  Model     {model}
  (also in {data_dir / DEMO_FILE})
  Replicas  {pasteable("status", "--data-dir", str(data_dir))}

In a terminal:

curl -N {access.base_url}/chat/completions \\
  -H "Authorization: Bearer {access.api_key}" \\
  -H "Content-Type: application/json" \\
  -d {shlex.quote(body)}

In Python (pip install openai):

from openai import OpenAI

client = OpenAI(base_url="{access.base_url}", api_key="{access.api_key}")
stream = client.chat.completions.create(
    model={json.dumps(model)},
    messages={json.dumps(messages)},
    temperature={TEMPERATURE},
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
"""


def pasteable(*arguments: str) -> str:
    """A command of ours that a shell in any folder understands, on the path or not."""
    program = Path(sys.executable).with_name("headrace")
    command = (str(program), *arguments) if program.exists() else headrace(*arguments)
    return shlex.join(command)
