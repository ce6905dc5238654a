"""What a person sees when everything is up: enough to have a first conversation by pasting."""

import json

from cli.demo_access import DemoAccess

_QUESTION = "Why is the sky blue? Answer in one sentence."


def ready_block(access: DemoAccess, model: str, demo_file: str) -> str:
    """Base URL, key, a curl that streams and a Python program that streams."""
    messages = [{"role": "user", "content": _QUESTION}]
    body = json.dumps({"model": model, "stream": True, "messages": messages})
    return f"""
Headrace is ready. Ctrl-C stops it.

  Base URL  {access.base_url}
  API key   {access.api_key}
  Model     {model}
  (also in {demo_file})

In a terminal:

curl -N {access.base_url}/chat/completions \\
  -H "Authorization: Bearer {access.api_key}" \\
  -H "Content-Type: application/json" \\
  -d '{body}'

In Python (pip install openai):

from openai import OpenAI

client = OpenAI(base_url="{access.base_url}", api_key="{access.api_key}")
stream = client.chat.completions.create(
    model="{model}",
    messages=[{{"role": "user", "content": "{_QUESTION}"}}],
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
"""
