"""Tenants and database roles: which role sees which tenant, where row-level security goes by roles."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TypeVar

from pgmemory import schema
from pgmemory.errors import ConfigurationError
from pgmemory.names import indexed_id, text_id
from pgmemory.pool import Execute
from pgmemory.queries import security
from pgmemory.queries.parts import in_schema
from pgmemory.store.base import StoreBase

T = TypeVar("T")


class TenantOperations(StoreBase):
    """What the owner of the tables does about roles; each works on any tenant."""

    def bind_role(self, role: str, tenant_id: str | int | uuid.UUID) -> None:
        """Let a database role see one tenant, and give it the rights that an application needs.

        The rights are those to use the schema, to read and write rows, and to look whether the schema fits; tables of
        later versions are included. Where row-level security goes by roles, which ``setup(row_level_security="roles")``
        lets it, the role sees this tenant and no other. A role that is bound already gets the new tenant. The role
        bound is the current one: ``set role`` to another changes the tenant too.

        Args:
            role: A role that exists.
            tenant_id: Its tenant.

        Raises:
            ConfigurationError: There is no such role, it could lift or bypass policies, or the tenant is missing.
            SchemaError: The schema is missing, too old or too new, or this role may not do it.
        """
        parameters = security.parameters(self.schema) | {
            "role": text_id("role", role),
            "tenant_id": indexed_id("tenant_id", tenant_id),
        }

        def bind(execute: Execute) -> None:
            found = execute(security.FIND_ROLE, parameters)
            if not found:
                raise ConfigurationError(f"there is no role {role!r}: `create role` makes one")
            ((owns, bypassing),) = found
            if owns or bypassing:
                may = "act as the owner of the schema or of what is in it"
                if bypassing:
                    may = f"bypass row-level security, by the rights of {bypassing!r}"
                raise ConfigurationError(
                    f"the role {role!r} may {may}, so no policy binds it: give the application a role of its own"
                )
            execute(in_schema(security.BIND_ROLE, self.schema), parameters)
            schema.run_returned(execute, in_schema(security.GRANT_RIGHTS, self.schema), parameters)

        self._change("bind_role", bind)

    def unbind_role(self, role: str) -> str | None:
        """Take from a database role its tenant and the rights that `bind_role` gave it; return the tenant it had.

        Also works for a role that was dropped.

        Raises:
            SchemaError: The schema is missing, too old or too new, or this role may not do it.
        """
        parameters = security.parameters(self.schema) | {"role": text_id("role", role)}

        def unbind(execute: Execute) -> str | None:
            found = execute(in_schema(security.UNBIND_ROLE, self.schema), parameters)
            if not found:
                return None
            schema.run_returned(execute, security.REVOKE_RIGHTS, parameters)
            tenant_id: str = found[0][0]
            return tenant_id

        return self._change("unbind_role", unbind)

    def _change(self, name: str, function: Callable[[Execute], T]) -> T:
        def run() -> T:
            with schema.changing(self._database, self.schema) as execute:
                return function(execute)

        schema.require_fitting(self.schema_status(), self.schema)
        return self._database.repeat(run, name=name)
