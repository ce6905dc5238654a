"""A server's URL that cannot work is refused in words that show nothing of it."""

from collections.abc import Callable

import pytest

from control.server_urls import check_broker_url, check_database_url, check_redis_url


@pytest.mark.parametrize(
    ("check", "url"),
    [
        (check_database_url, "postgresql://u:p@db:5432/headrace"),
        (check_database_url, "postgres://db/headrace"),
        (check_database_url, "postgresql+psycopg://u@/headrace?host=%2Ftmp%2Fpg"),
        (check_database_url, "postgresql://u:p%40ss%2Fw@db/headrace?sslmode=require"),
        (check_redis_url, "redis://127.0.0.1:6379/0"),
        (check_redis_url, "rediss://:p%40ss@cache:6380/0?ssl_cert_reqs=required"),
        (check_redis_url, "unix:///run/valkey.sock?db=0"),
        (check_broker_url, "redis://:p@cache:6379/1"),
        (check_broker_url, "redis+socket:///run/valkey.sock?virtual_host=1"),
        (check_broker_url, "sentinel://a:26379;sentinel://b:26379"),
        (check_broker_url, "amqp://u:p@rabbit//"),
    ],
)
def test_a_url_that_can_work_is_taken_as_it_is(check: Callable[[str], str], url: str) -> None:
    assert check(url) == url


@pytest.mark.parametrize(
    ("check", "url"),
    [
        (check_database_url, ""),
        (check_database_url, "nonsense"),
        (check_database_url, "mysql://u:hunter2@db/x"),
        (check_database_url, "postgresql://u:hunter2@db:port/x"),
        (check_database_url, "postgresql://u:p@hunter2@db/x"),
        (check_database_url, "postgresql://u:hunter2@db/x?hunter3=1"),
        (check_redis_url, ""),
        (check_redis_url, "nonsense"),
        (check_redis_url, "http://:hunter2@cache"),
        (check_redis_url, "redis://:hunter2/3@cache:6379"),
        (check_redis_url, "redis://u:12/hunter2@cache:6379"),
        (check_redis_url, "redis://u:12#hunter2@cache:6379"),
        (check_redis_url, "redis://:hunter2@cache:6379?unknown=1"),
        (check_broker_url, ""),
        (check_broker_url, "nonsense"),
        (check_broker_url, "https://u:hunter2@cache"),
        (check_broker_url, "redis://:hunter2/3@cache:6379/1"),
    ],
)
def test_any_other_is_refused_with_an_example_and_nothing_of_it(
    check: Callable[[str], str], url: str
) -> None:
    with pytest.raises(ValueError, match=r"it must .*://") as refusal:
        check(url)
    assert refusal.value.__context__ is None or refusal.value.__suppress_context__
    assert "hunter" not in str(refusal.value)
    assert "nonsense" not in str(refusal.value)
