need dpkg-deb apt-get
mkdir -p p/DEBIAN p/usr/bin
cat >p/DEBIAN/control <<'C'
Package: warren-prove
Version: 1
Architecture: all
Maintainer: nobody <nobody@localhost>
Description: made by warren prove
C
printf '#!/bin/sh\necho from the package\n' >p/usr/bin/warren-prove-deb
chmod 755 p/usr/bin/warren-prove-deb
chmod 755 .
dpkg-deb --root-owner-group --build p warren-prove.deb >/dev/null
DEBIAN_FRONTEND=noninteractive apt-get install -y ./warren-prove.deb >log 2>&1 || { tail -n 5 log >&2; exit 1; }
[ "$(warren-prove-deb)" = "from the package" ]
dpkg -r warren-prove >/dev/null
echo "a .deb built inside, installed by apt-get and removed; no network needed"
