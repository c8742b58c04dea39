"""Prints what is live in a comment: mentions, references, links, elements of a guest's, and what is left open."""

import re
import sys
from html.parser import HTMLParser

import cmarkgfm
from cmarkgfm.cmark import Options

# What our own texts are made of.
OURS = {
    "p", "h3", "h4", "em", "strong", "code", "pre", "ul", "li", "table", "thead", "tbody", "tr", "th", "td", "details", "summary",
    "sub", "a", "br", "hr",
}
RUN = re.compile(r"https://github\.com/octo/widgets/actions/runs/\d+/attempts/\d+")
ACTIVE = re.compile(r"@\w[\w/-]*|\b[\w.-]+/[\w.-]+#\d+|#\d+|\bGH-\d+|https?://\S+|www\.\S+|javascript:\S*")


class Live(HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.found = [], []

    def handle_starttag(self, tag, attributes):
        if tag not in OURS:
            self.found.append(f"<{tag}>")
        for name, value in attributes:
            if name.startswith("on") or (name in ("href", "src") and not RUN.fullmatch(value or "")):
                self.found.append(f"{name}={value}")
        if tag not in ("br", "hr", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.found.append(f"</{tag}> closes something else")

    def handle_data(self, text):
        if "code" not in self.open and "pre" not in self.open:
            self.found += ACTIVE.findall(text)

    def handle_comment(self, text):
        if not re.fullmatch(r" plimsoll:(comment v1|details|end|section v1 [a-z0-9= -]+) ", text):
            self.found.append(f"<!--{text}-->")


with open(sys.argv[1], encoding="utf-8") as file:
    html = cmarkgfm.github_flavored_markdown_to_html(file.read(), options=Options.CMARK_OPT_UNSAFE)
live = Live()
live.feed(html)
live.close()
live.found += [f"{tag} is left open" for tag in live.open]
print("\n".join(live.found), end="")
