"""The file of identities: what it may hold, and whom a token or a certificate shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon import auth, errors
from daemon.auth import Scope
from tests._support.door_files import identity, token_of

OTHER = "1" * 64


def read(tmp_path: Path, *tables: str) -> auth.Identities:
    path = tmp_path / "identities.toml"
    path.write_text("\n".join(tables))
    return auth.read_identities(str(path))


def test_a_token_and_a_name_of_a_certificate_show_an_identity(tmp_path: Path) -> None:
    known = read(
        tmp_path, identity("a", ["add", "inspect"], ["a/", "b/"]), identity("c", [], [""], certificates=["c.example"])
    )
    of_token, of_certificate = known.of_token(token_of("a")), known.of_certificate(["x", "c.example"])
    assert of_token is not None
    assert of_certificate is not None
    assert (of_token.name, of_token.scopes) == ("a", frozenset({Scope.ADD, Scope.INSPECT}))
    assert [of_token.may_use(topic) for topic in ("a/1", "b/", "c", "", "a")] == [True, True, False, False, False]
    assert (of_certificate.name, of_certificate.may_use("")) == ("c", True)
    assert (known.of_token("unknown"), known.of_certificate(["a"])) == (None, None)


def test_who_has_no_prefix_may_use_nothing(tmp_path: Path) -> None:
    nobody = read(tmp_path, identity("a", ["add"], [])).of_token(token_of("a"))
    assert nobody is not None
    assert not nobody.may_use("")
    assert not nobody.may_use("a")


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ([""], "Object missing required field `identity`"),
        (["identity = []"], r"at least one \[\[identity\]\]"),
        (["identity"], "is not TOML"),
        ([identity("a", ["read"], [])], r"Invalid enum value 'read' - at `\$.identity\[0\].scopes"),
        ([identity("a", ["add"], [], tokens=["abc"])], "regex"),
        ([identity("a", ["add"], []).replace("name", "nam")], "unknown field `nam`"),
        ([identity("a", ["add"], [], tokens=[])], "identity 'a' has neither tokens nor certificates"),
        ([identity("a", ["add"], []), identity("a", ["add"], [], tokens=[OTHER])], "identity 'a' has name that"),
        ([identity(name, ["add"], [], tokens=[OTHER]) for name in "ab"], "identity 'b' has a token that identity 'a'"),
        (
            [identity(name, ["add"], [], certificates=["c"]) for name in "ab"],
            "identity 'b' has a certificate that identity 'a'",
        ),
    ],
)
def test_what_is_wrong_is_told_with_the_file(tmp_path: Path, tables: list[str], says: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=rf"access.identities_file .*identities.toml.*{says}"):
        read(tmp_path, *tables)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidArgument, match="nowhere cannot be read: No such file"):
        auth.read_identities(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("authorization", "token"),
    [("Bearer x", "x"), ("bearer  x ", "x"), ("Basic x", None), ("Bearer", None), ("Bearer ", None), ("", None)],
)
def test_a_bearer_token_is_read(authorization: str, token: str | None) -> None:
    assert auth.bearer_of(authorization) == token
