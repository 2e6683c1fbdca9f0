"""For the site: a class under `@settings` is a frozen dataclass, so its fields are its arguments (`gpp.settings.settings`)."""

from __future__ import annotations

from typing import Any, final

from griffe import Class, Decorator, ExprAttribute, ExprCall, ExprKeyword, ExprName, Extension


@final
class Settings(Extension):
    """Shows griffe, which reads code and does not run it, the dataclass that the decorator makes."""

    def on_class_instance(self, *, cls: Class, **others: Any) -> None:
        """Add the decorator that stands for it."""
        if any(decorator.callable_path == "gpp.settings.settings" for decorator in cls.decorators):
            module = ExprName("dataclasses")
            dataclass = ExprAttribute([module, ExprName("dataclass", parent=module)])
            call = ExprCall(dataclass, [ExprKeyword("kw_only", "True")])
            cls.decorators.append(Decorator(call, lineno=cls.lineno, endlineno=cls.lineno))
