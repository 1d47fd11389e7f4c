"""Elements of a page.

Text is escaped where it becomes a part of one, so that nothing in a run can become markup.
"""

from html import escape


class Html(str):
    """Text that is markup already."""


def element(
    name: str, /, *children: str | Html | None, **attributes: str | float | bool | None
) -> Html:
    """An element with its children; those that are no `Html` are escaped, and attributes as well.
    `_` in a name is a `-`, at the end nothing.

    >>> element("p", "a < b", element("b", "!"), class_="note", hidden=True, title=None)
    '<p class="note" hidden>a &lt; b<b>!</b></p>'
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}"
        + ("" if value is True else f'="{escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    inside = join(*children)
    return Html(
        f"<{name}{written}>"
        if name in ("meta", "input", "wbr")
        else f"<{name}{written}>{inside}</{name}>"
    )


def join(*children: str | Html | None) -> Html:
    """Elements and text one after the other.

    >>> join("1 & 2 ", element("i", "x"), None)
    '1 &amp; 2 <i>x</i>'
    """
    return Html(
        "".join(
            child if isinstance(child, Html) else escape(child)
            for child in children
            if child is not None
        )
    )
