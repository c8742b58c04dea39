# Installs a release of plimsoll and prints its path; or prints what is wrong, in one line, and returns 12.
#
#   plimsoll_install VERSION [SHA256] [DOWNLOAD_URL]
#
# The program is one static file. It is downloaded beside its place, checked, and moved there, so that nothing is ever run
# that is not what the digest says, and two jobs do not meet. One that is there already is checked again. It is kept in the
# runner's tool cache, or in the user's cache where there is none.
#
# POSIX shell only. `templates/run.yml` has a copy, since a component is a single file; a test compares them.
plimsoll_install() {
  version=${1#v} url=${3:-https://github.com/plimsoll-ci/plimsoll/releases/download}
  case $version in
    latest) echo 'the input version is "latest", which no digest belongs to: name a version'; return 12 ;;
    '' | *[!0-9A-Za-z.+-]* | .*) echo 'the input version is no version, such as 0.1.0'; return 12 ;;
  esac
  case $url in
    *[![:graph:]]*) echo 'the input download-url holds a blank'; return 12 ;;
    https://* | http://* | file://*) ;;
    *) echo 'the input download-url begins with none of https://, http:// and file://'; return 12 ;;
  esac
  case $(uname -s)/$(uname -m) in
    Linux/x86_64) arch=x86_64 ;;
    Linux/aarch64 | Linux/arm64) arch=aarch64 ;;
    *) echo "there is no release for $(uname -s) on $(uname -m): build plimsoll, and name it by the input binary"; return 12 ;;
  esac
  # The digests of releases: VERSION ARCH SHA256. `packaging/release sums` prints the lines for a new one.
  sha256=${2:-$(while read -r v a s; do if [ "$v $a" = "$version $arch" ]; then echo "$s"; fi; done <<'END_OF_DIGESTS'
END_OF_DIGESTS
  )}
  case $sha256 in
    '') echo "no digest of plimsoll $version for $arch is known here: take it from the release's SHA256SUMS and give it as the input sha256"; return 12 ;;
    *[!0-9a-f]*) echo 'the input sha256 is no SHA-256 in lowercase hexadecimal'; return 12 ;;
  esac
  if [ ${#sha256} -ne 64 ]; then echo 'the input sha256 is no SHA-256: it has not 64 digits'; return 12; fi
  if ! command -v sha256sum > /dev/null; then echo 'sha256sum is not on this runner: install coreutils'; return 12; fi

  if [ -n "${RUNNER_TOOL_CACHE:-}" ]; then directory=$RUNNER_TOOL_CACHE/plimsoll/$version/$arch
  else directory=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/plimsoll-releases/$version/$arch; fi
  program=$directory/plimsoll
  if [ -f "$program" ] && echo "$sha256  $program" | sha256sum -c > /dev/null 2>&1; then echo "$program"; return; fi

  name=plimsoll-$version-$arch-linux
  from=${url%/}/v$version/$name
  if ! part=$(mkdir -p "$directory" && mktemp "$directory/part.XXXXXX"); then echo "$directory cannot be written"; return 12; fi
  if command -v curl > /dev/null; then
    why=$(curl --silent --show-error --fail --globoff --location --retry 3 --connect-timeout 30 --output "$part" "$from" 2>&1)
  elif command -v wget > /dev/null; then
    why=$(wget -q -T 30 -O "$part" "$from" 2>&1)
  else
    why='neither curl nor wget is on this runner'
  fi || { code=$?; why=${why:-the download failed with exit code $code}; }
  if [ ! -s "$part" ]; then
    rm -f "$part"
    echo "$from could not be fetched: ${why:-it is empty}" | tr -s '\r\n' '  '
    return 12
  fi
  found=$(sha256sum < "$part")
  if [ "${found%% *}" != "$sha256" ]; then
    rm -f "$part"
    echo "$from is not what was asked for, and was not run: its SHA-256 is ${found%% *}, and $sha256 was expected"
    return 12
  fi
  if ! { chmod 755 "$part" && mv -f "$part" "$program"; }; then rm -f "$part"; echo "$program cannot be written"; return 12; fi
  echo "$program"
}
