# syntax=docker/dockerfile:1
# The daemon, in an environment of its own. A root that must outlive the machine is S3; the volume is for a local root.
#
#   docker build -t tarryd .
#
# It listens on every address, and ends with status 2 until it is told how strangers are kept out: by TLS and identities,
# whose files docs/SECURITY.md shows how to make and user 7461 must be able to read,
#
#   docker run -p 7461:7461 -p 7462:7462 -v tarry:/var/lib/tarry -v /etc/tarry:/etc/tarry:ro -e TARRY_DAEMON__ID=one \
#     -e TARRY_TLS__CERT_FILE=/etc/tarry/tls.crt -e TARRY_TLS__KEY_FILE=/etc/tarry/tls.key \
#     -e TARRY_ACCESS__IDENTITIES_FILE=/etc/tarry/identities.toml \
#     -e TARRY_METRICS__TLS=true -e TARRY_METRICS__TOKENS=true tarryd
#
# or by the network, here because only this machine reaches the published ports:
#
#   docker run -p 127.0.0.1:7461:7461 -p 127.0.0.1:7462:7462 -v tarry:/var/lib/tarry -e TARRY_DAEMON__ID=one \
#     -e TARRY_DAEMON__INSECURE=true tarryd
#
# With EXTRAS="--extra spark" it has the batch jobs as well, `tarry-spark ... --engine local`; with "--extra spark --extra
# java" also Spark itself, on one machine:
#
#   docker build --build-arg EXTRAS="--extra spark" -t tarry-jobs .
#   docker run --rm -v tarry:/var/lib/tarry --entrypoint tarry-spark tarry-jobs forecast --engine local
#
# A relay instead of the daemon, with its settings in a file that names the brokers and the daemon as the container
# reaches them:
#
#   docker build --build-arg EXTRAS="--package tarry-relay --extra kafka --extra nats --extra redis" -t tarry-relay .
#   docker run -v ./relay.toml:/relay.toml --entrypoint tarry-relay tarry-relay run /relay.toml
#
# The id must be the same for the next container on the same root: it then takes its shards back at once.
#
# A build that must be the same tomorrow names the base by its digest: --build-arg BASE=python:3.11-slim-bookworm@sha256:...

ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
RUN pip install --no-cache-dir uv==0.13.8
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never
WORKDIR /opt/tarry
ARG EXTRAS=""
# The libraries first: they change less often than the code.
COPY pyproject.toml uv.lock README.md LICENSE ./
COPY client/pyproject.toml client/README.md client/LICENSE client/
COPY relay/pyproject.toml relay/README.md relay/LICENSE relay/
COPY storage_backends/pyproject.toml storage_backends/README.md storage_backends/LICENSE storage_backends/
RUN uv sync --locked --no-dev --no-install-workspace ${EXTRAS}
COPY batch batch
COPY client client
COPY daemon daemon
COPY deploy deploy
COPY relay relay
COPY storage_backends storage_backends
RUN uv sync --locked --no-dev --no-editable ${EXTRAS}

FROM ${BASE}
RUN useradd --system --uid 7461 --user-group --home-dir /var/lib/tarry --create-home tarry \
    && install --directory --owner=7461 --group=tarry --mode=0700 /run/tarry
COPY --from=build /opt/tarry/.venv /opt/tarry/.venv
# Inside a container loopback reaches no one. What reaches the published ports is the decision of whoever runs it.
ENV PATH=/opt/tarry/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TARRY_GRPC__LISTEN=0.0.0.0:7461 \
    TARRY_GRPC__UNIX_SOCKET=/run/tarry/tarryd.sock \
    TARRY_METRICS__LISTEN=0.0.0.0:7462 \
    TARRY_STORE__PATH=/var/lib/tarry/root
USER 7461
WORKDIR /var/lib/tarry
VOLUME /var/lib/tarry
EXPOSE 7461 7462
# A daemon that stands by (status 4) is not ill, and sends clients to the owner.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD tarryd health || [ $? -eq 4 ]
# SIGTERM drains: no new calls, what is staged becomes durable, the shards are given up.
STOPSIGNAL SIGTERM
ENTRYPOINT ["tarryd"]
