"""One tiny dataset, shared by the tests of views; it is never written to."""

import pytest

from spec_data.options.view_options import DropColumnsConfig
from spec_data.views.drop_columns import plan_drop_columns
from spec_data.views.write_view import write_view
from tests.factory import tiny_dataset


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Twenty-four documents in three shards, bf16, every column at every token."""
    return tiny_dataset(tmp_path_factory.mktemp("views") / "set")


@pytest.fixture(scope="session")
def sparse(data, tmp_path_factory):
    """The same with the teacher at supervised tokens only."""
    out = tmp_path_factory.mktemp("views-sparse") / "set"
    config = DropColumnsConfig(
        data=str(data), out=str(out), final="supervised", teacher="supervised"
    )
    write_view(out, plan_drop_columns(config))
    return out
