need git
export HOME=$PWD GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
git init -q r
cd r
i=0
while [ $i -lt 20 ]; do
	echo $i >f$i
	git add f$i
	git commit -qm "c$i"
	i=$((i + 1))
done
cd ..
git clone -q r s
[ "$(git -C s rev-list --count HEAD)" = 20 ]
git -C s gc -q
git -C s fsck --strict >/dev/null 2>&1
git --version
