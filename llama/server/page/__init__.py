"""The web page at `/`: its files, joined into one, and the policy that they need.

In: `index.html`, which names the style and the scripts in their order. Out: one HTML text without
any address of its own server, and its Content-Security-Policy. The scripts share one global scope.
"""

import base64
import hashlib
import re
from importlib.resources import files


def read_page() -> str:
    """Return the page as one text, with the style and the scripts in place of their tags."""
    folder = files(__name__)

    def read(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    index = read("index.html")
    scripts = re.findall(r'<script src="(.*?)"></script>', index)
    before, _, rest = index.partition('<link rel="stylesheet" href="style.css" />')
    between, _, after = re.split(r"(<script src=.*</script>)", rest, flags=re.DOTALL)
    style = f"<style>\n{read('style.css')}</style>"
    script = f"<script>\n{''.join(map(read, scripts))}</script>"
    return "".join([before, style, between, script, after])


def content_security_policy(page: str) -> str:
    """Return a policy that allows the page's own script and style, and this server alone.

    Source: Content Security Policy Level 3, https://www.w3.org/TR/CSP3/.
    """

    def hash_of(tag: str) -> str:
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = hashlib.sha256(content.encode()).digest()
        return f"'sha256-{base64.b64encode(digest).decode()}'"

    allowed = {
        "default-src": "'none'",
        "script-src": hash_of("script"),
        "style-src": hash_of("style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        # The browser refuses to make HTML or a script of a string.
        "trusted-types": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return "; ".join(f"{name} {source}" for name, source in allowed.items())
