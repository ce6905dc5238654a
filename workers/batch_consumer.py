"""What stands before Celery: doorbells are handed on, and every other message is put aside.

A message that stops its reader is given back and stops the next one, for ever. So nothing
reaches Celery that is not exactly what `Doorbell` sends.
"""

import logging
from collections.abc import Callable
from uuid import UUID

from celery.worker.consumer import Consumer
from kombu.message import Message

from control.batches.batch import is_batch_id
from control.batches.doorbell import TASK
from workers.batch_dead_letters import put_aside

log = logging.getLogger(__name__)


class NotADoorbell(ValueError):
    """The message is not what `Doorbell` sends."""


class DoorbellConsumer(Consumer):  # type: ignore[misc]  # Celery has no types
    """Hands on doorbells and puts every other message aside."""

    def create_task_handler(self) -> Callable[[Message], None]:
        """What is called with each message. It reads no socket, so no error is the broker's."""
        hand_on = super().create_task_handler()

        def on_message(message: Message) -> None:
            try:
                check_doorbell(message)
                hand_on(message)
            except Exception as error:  # noqa: BLE001 - whatever it is, this message caused it
                self.on_decode_error(message, error)

        return on_message

    def on_decode_error(self, message: Message, exc: Exception) -> None:
        """Put the message aside. Kombu calls this too, for what it cannot decode."""
        put_aside(message.channel, (message.headers, message.body), exc)
        message.reject_log_error(log, self.connection_errors)  # type: ignore[no-untyped-call]  # Kombu has no types


def check_doorbell(message: Message) -> None:
    """Raise, whatever exception it may be, unless the message is a doorbell and no more."""
    headers = message.headers
    is_plain = (
        headers["task"] == TASK
        and headers["id"] == str(UUID(headers["id"]))
        and headers.get("eta") is None
        and headers.get("expires") is None
        and not any(headers.get("timelimit") or ())
    )
    [batch_id], kwargs, embedded = message.payload
    if not is_plain or kwargs or any(embedded.values()) or not is_batch_id(batch_id):
        raise NotADoorbell
