# An image with plimsoll in it, for jobs that run in containers. What a container runtime has to allow: docs/hosts.md.
#
#   docker build -t plimsoll .                                           builds the program too, which takes a while
#   docker build -t plimsoll --build-arg PROGRAM=release -f Dockerfile DIR   takes DIR/plimsoll, a release's program
#
# No entry point, since GitLab's and GitHub's runners start a shell of their own in it.

# Where the program comes from: a stage of this file, `source` or `release`.
ARG PROGRAM=source
ARG BASE=debian:bookworm-slim

FROM rust:1.95-slim-bookworm AS source
WORKDIR /src
COPY . .
RUN cargo build --release --locked && install -m 755 target/*/release/plimsoll /plimsoll

FROM scratch AS release
COPY plimsoll /plimsoll

FROM ${PROGRAM} AS program

FROM ${BASE}
# Roots of trust for publishing to a forge; a base of your own may have them.
RUN [ -e /etc/ssl/certs/ca-certificates.crt ] || { \
      apt-get update && apt-get install --yes --no-install-recommends ca-certificates && rm -rf /var/lib/apt/lists/*; \
    }
RUN useradd --uid 1000 --create-home plimsoll
COPY --from=program --chmod=755 /plimsoll /usr/local/bin/plimsoll
# By number, so that Kubernetes can see that it is not root (`runAsNonRoot`).
USER 1000:1000
WORKDIR /home/plimsoll
CMD ["plimsoll", "doctor"]
