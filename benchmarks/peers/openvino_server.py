"""The least HTTP that makes OpenVINO GenAI comparable to servers: a streamed /v1/completions.

Its package for Python has no server. This one is as thin as it can be, so that what is measured
is the engine: token ids in, one event for each step's tokens, no checks, loopback only.

    python -m benchmarks.peers.openvino_server FOLDER KV PORT
"""

import asyncio
import json
import sys
from dataclasses import dataclass, field

from benchmarks.peers.openvino_engine import OpenVinoEngine

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
)
HEALTHY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
# Turns of the event loop between two steps, in which sockets are read and written.
TURNS_PER_STEP = 4


@dataclass(eq=False)
class Stream:
    """One answer on its way: the engine's handle, and tokens that are not yet written."""

    handle: object
    tokens: asyncio.Queue[list[int] | None] = field(default_factory=asyncio.Queue)


class Front:
    """The engine on the event loop itself: a step keeps the interpreter's lock anyhow."""

    def __init__(self, engine: OpenVinoEngine) -> None:
        self._engine = engine
        self._tokenizer = engine.pipeline.get_tokenizer()
        self._streams: set[Stream] = set()
        self._has_work = asyncio.Event()

    async def compute(self) -> None:
        """Step while there is work, and hand out what each step said."""
        while True:
            await self._has_work.wait()
            self._engine.pipeline.step()
            for stream in list(self._streams):
                self._hand_out(stream)
            if not self._streams:
                self._has_work.clear()
            for _ in range(TURNS_PER_STEP):
                await asyncio.sleep(0)

    def _hand_out(self, stream: Stream) -> None:
        handle = stream.handle
        while handle.can_read():  # type: ignore[attr-defined]  # untyped library
            for output in handle.read().values():  # type: ignore[attr-defined]  # untyped library
                stream.tokens.put_nowait(list(output.generated_ids))
        if not str(handle.get_status()).endswith("RUNNING"):  # type: ignore[attr-defined]  # untyped
            stream.tokens.put_nowait(None)
            self._streams.discard(stream)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: a health probe, or one completion."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET "):
                writer.write(HEALTHY)
                await writer.drain()
                return
            lines = head.lower().split(b"\r\n")
            length = next(int(x[15:]) for x in lines if x.startswith(b"content-length:"))
            body = json.loads(await reader.readexactly(length))
            await self._complete(body, writer)
        finally:
            writer.close()

    async def _complete(self, body: dict[str, list[int]], writer: asyncio.StreamWriter) -> None:
        prompt = body["prompt"]
        if isinstance(prompt, str):
            prompt = self._tokenizer.encode(prompt).input_ids.data[0].tolist()
        stream = Stream(self._engine.submit(prompt, int(str(body["max_tokens"]))))
        self._streams.add(stream)
        self._has_work.set()
        writer.write(HEAD)
        count = 0
        while (tokens := await stream.tokens.get()) is not None:
            count += len(tokens)
            # Random prompts give bytes that are no text; a reader must see that they came.
            text = self._tokenizer.decode(tokens) or "\ufffd"
            _write_event(writer, {"choices": [{"index": 0, "text": text, "finish_reason": None}]})
            await writer.drain()
        _write_event(
            writer,
            {
                "choices": [],
                "usage": {"prompt_tokens": len(prompt), "completion_tokens": count},
            },
        )
        _write_chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def serve(engine: OpenVinoEngine, port: int) -> None:
    """Answer until killed."""
    front = Front(engine)
    server = await asyncio.start_server(front.answer, "127.0.0.1", port, backlog=256)
    async with server:
        await asyncio.gather(front.compute(), server.serve_forever())


def _write_event(writer: asyncio.StreamWriter, event: dict[str, object]) -> None:
    _write_chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def _write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


if __name__ == "__main__":
    asyncio.run(
        serve(
            OpenVinoEngine(sys.argv[1], sys.argv[2], has_prefix_cache=True),
            int(sys.argv[3]),
        )
    )
