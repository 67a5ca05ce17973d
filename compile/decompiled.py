"""Artifact: bytecode that Dynamo wrote, as Python where ``depyf`` is installed, as instructions otherwise."""

from __future__ import annotations

import dis
import io
import types
import warnings

from pwcc.cache.errors import install


def decompiled(code: types.CodeType) -> str:
    """Return a code object as text for people, with a first line that says what it is.

    ``depyf`` (the extra of that name) decompiles it; it knows most of what Dynamo writes, not all. Where it
    is absent or fails, the text is :mod:`dis`'s.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            import depyf

            text = str(depyf.decompile(code))
    except ImportError:
        why = f"to see it as Python, {install('depyf')}"
    except Exception as error:  # noqa: BLE001  a third party's decompiler, over bytecode it may not know
        why = f"depyf could not decompile it: {type(error).__name__}: {error}".splitlines()[0]
    else:
        return f"# what Dynamo runs in place of {code.co_name}, decompiled by depyf\n{text.rstrip()}\n"
    lines = io.StringIO()
    dis.dis(code, file=lines)
    return f"# what Dynamo runs in place of {code.co_name}, as instructions; {why}\n{lines.getvalue()}"
