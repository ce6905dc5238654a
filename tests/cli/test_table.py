"""A table shows every name whole, on any terminal and to any program."""

import pytest

from cli.table import lay_out, print_table

COLUMNS = ("replica", "version")
ROWS = [("some-model-0123456789ab", "v1"), ("m-1", "")]


def test_a_wide_terminal_gets_aligned_columns() -> None:
    assert lay_out(COLUMNS, ROWS, 80) == [
        "replica                  version",
        "some-model-0123456789ab  v1",
        "m-1",
    ]


def test_a_narrow_terminal_gets_a_block_for_each_row_and_nothing_is_cut() -> None:
    assert lay_out(COLUMNS, ROWS, 20) == [
        "replica  some-model-0123456789ab",
        "version  v1",
        "",
        "replica  m-1",
        "version",
        "",
    ]


@pytest.mark.parametrize("width", [1, 20, 80])
def test_without_rows_there_are_still_the_names_of_the_columns(width: int) -> None:
    assert lay_out(COLUMNS, [], width) == ["replica  version"]


def test_characters_that_take_two_columns_are_counted_so() -> None:
    assert lay_out(("name", "id"), [("水車", "1"), ("mill", "2")], 80) == [
        "name  id",
        "水車  1",
        "mill  2",
    ]


def test_a_program_gets_tabs_and_a_header(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(COLUMNS, ROWS)

    assert capsys.readouterr().out == ("replica\tversion\nsome-model-0123456789ab\tv1\nm-1\t\n")
