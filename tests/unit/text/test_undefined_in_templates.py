"""What is undefined in a chat template is told with its line, and its column where that is sure."""

from __future__ import annotations

import pytest

from pagewire_frontend.compiled_template import CompiledTemplate
from pagewire_frontend.errors import ChatTemplateError


@pytest.mark.parametrize(
    ("source", "line", "column"),
    [
        ("a\n  {{ nobody.name }}", 2, 6),
        ("nobody: {{ nobody() }}", 1, 12),
        ("{% for m in messages %}\r\n{{ m.content.parts }}{% endfor %}", 2, 6),
        ("{{ messages[0]['content']['parts'] }}", 1, 17),
        ("{# nobody #}{%- set x = nobody.name -%}", 1, 25),
        # Either may be meant, or neither.
        ("{{ nobody.a ~ nobody.b }}", 1, 0),
        ("role: {{ messages[0]['ro' ~ 'les'].x }}", 1, 0),
        ("{{ messages[3].role }}", 1, 0),
        ("{{ 1 // 0 }}", 1, 0),
    ],
)
def test_the_column_is_that_of_the_name(source: str, line: int, column: int) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        CompiledTemplate(source).render({"messages": [{"role": "user"}]})
    assert (caught.value.line, caught.value.column) == (line, column)
    where = f"(line {line}, column {column})" if column else f"(line {line})"
    assert caught.value.message.endswith(where)
