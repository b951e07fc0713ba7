"""How every page of this package is rendered. Everyone may import this."""

import jinja2


def environment() -> jinja2.Environment:
    """The templates of the package: everything is escaped, and a name without a value is an
    error."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("zest_jax", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
