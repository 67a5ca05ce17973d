"""The look of a report page: one style sheet, light and dark, and the colours of pieces."""

from __future__ import annotations

import re
from typing import Final

STYLE: Final = """
:root{color-scheme:light dark;--line:#8884;--soft:#8882}
body{font:15px/1.5 system-ui,sans-serif;margin:0}
main{max-width:70rem;margin:0 auto;padding:1.5rem}
h1{font-size:1.6rem;margin:0 0 1rem}
h2{font-size:1.2rem;margin:2.2rem 0 .6rem;border-bottom:1px solid var(--line)}
h3{font-size:1rem;margin:.6rem 0 .3rem}
h4{font-size:.95rem;margin:.9rem 0 .2rem}
dl{display:grid;grid-template-columns:9rem minmax(0,1fr);gap:.15rem 1rem;margin:0}
dt{opacity:.7}
dd{margin:0;overflow-wrap:anywhere}
.flow{display:flex;flex-wrap:wrap;gap:.3rem;align-items:center}
.flow>*{font:12px/1.2 ui-monospace,monospace;padding:.45rem .4rem;border-radius:.3rem}
.piece{color:#fff;text-decoration:none;min-width:1.6rem;text-align:center}
.cut{border:1px dashed var(--line);border-radius:1rem!important}
.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1.2rem}
.dot{display:inline-block;width:.8em;height:.8em;border-radius:.2em;margin-right:.4em}
table{border-collapse:collapse;font-size:.87rem}
th,td{text-align:left;padding:.2rem .8rem .2rem 0;vertical-align:top;border-bottom:1px solid var(--soft)}
th{font-weight:600}
.short,th{white-space:nowrap}
.wide{overflow-x:auto;margin:.3rem 0}
code{font:12px/1.4 ui-monospace,monospace;overflow-wrap:anywhere}
td code{display:inline-block;max-width:26rem}
.chips{list-style:none;padding:0;margin:.3rem 0 .7rem;display:flex;flex-wrap:wrap;gap:.3rem}
.chips li{border:1px solid var(--line);border-radius:.3rem;padding:0 .5rem;font-size:.87rem}
article{border-left:3px solid var(--soft);padding-left:1rem;margin:1rem 0}
details{margin:.3rem 0}
.bars{width:100%}
.bars th{font-weight:400;white-space:normal;width:16rem;overflow-wrap:anywhere}
.bars td{white-space:nowrap}
.bar{width:50%}
.bar span{display:block;height:1.1em;border-radius:.2em;min-width:2px}
.ops{font:12px/1.4 ui-monospace,monospace;display:flex;flex-wrap:wrap;gap:.2rem;list-style:none;padding:0}
.ops li{background:var(--soft);border-radius:.2rem;padding:.1rem .4rem}
summary{cursor:pointer}
.bad{color:#d33;font-weight:600}
@media (max-width:40rem){dl{grid-template-columns:1fr}dd{margin-bottom:.4rem}.bars th{width:7rem}}
@media print{
*{print-color-adjust:exact}
main{max-width:none;padding:0}
details::details-content{content-visibility:visible;display:block;height:auto}
tr,.flow>*,.bars{break-inside:avoid}
.wide{overflow:visible}
}
"""

_COLOURS: Final = ("#3266ad", "#a5562a", "#2f7d4f", "#8a3f8f", "#a8323e", "#587a1c", "#1f7a8c", "#6b5b95")


def colour(index: int) -> str:
    """Return the colour of the piece or bar of this index; they repeat."""
    return _COLOURS[index % len(_COLOURS)]


def shade_of(name: str, position: int = 0) -> int:
    """Return the colour's index of a piece: the number in its name, ``p3`` or ``p3 n=1``, else its position."""
    found = re.match(r"p(\d{1,9})\b", name)
    return int(found[1]) if found else position
