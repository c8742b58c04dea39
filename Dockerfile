# An image with plimsoll in it, for jobs that run in containers. What a container runtime has to allow: docs/hosts.md.
#
#   docker build -t plimsoll .                                   builds the program too, which takes a while
#   docker build -t plimsoll --target release -f Dockerfile DIR  takes DIR/plimsoll, a release's program
#
# No entry point, since GitLab's and GitHub's runners start a shell of their own in it.

ARG BASE=debian:bookworm-slim

FROM rust:1.95-slim-bookworm AS source
WORKDIR /src
COPY . .
RUN cargo build --release --locked && install -m 755 target/*/release/plimsoll /plimsoll

FROM ${BASE} AS base
# Roots of trust for publishing to a forge; a base of your own may have them.
RUN [ -e /etc/ssl/certs/ca-certificates.crt ] || { \
      apt-get update && apt-get install --yes --no-install-recommends ca-certificates && rm -rf /var/lib/apt/lists/*; \
    }
RUN useradd --uid 1000 --create-home plimsoll
# By number, so that Kubernetes can see that it is not root (`runAsNonRoot`).
USER 1000:1000
WORKDIR /home/plimsoll
CMD ["plimsoll", "doctor"]

FROM base AS release
COPY --chmod=755 plimsoll /usr/local/bin/plimsoll

FROM base
COPY --from=source --chmod=755 /plimsoll /usr/local/bin/plimsoll
