"""What a browser would make of a page."""

import json
from html.parser import HTMLParser

EVIL = (
    '</script><script>alert("x")</script><img src=x onerror="alert(1)"> \u202e \x00\x1b[31m & " \''
    " `${1}` <!-- ]]>"
)


class Page(HTMLParser):
    """A page's elements and text; markup that is out of order is an error."""

    VOID = ("meta", "input", "wbr")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self) -> str:
        return "".join(data for where, data in self.texts if where not in ("script", "style"))

    @property
    def handlers(self) -> list[str]:
        names = [name for _, attributes in self.elements for name in attributes]
        return [name for name in names if name.startswith("on")]

    @property
    def script(self) -> str:
        return [data for where, data in self.texts if where == "script"][-1]

    @property
    def data(self) -> dict:
        return json.loads(next(data for where, data in self.texts if where == "script"))
