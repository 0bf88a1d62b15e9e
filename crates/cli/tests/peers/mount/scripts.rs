//! Typical uses of sysfs and procfs files. Every path begins with `$T`; `$INT` is a file of
//! /proc/sys/net/core with a number. Masks name CPU 0 only, which every machine has.
//!
//! Files are set before they are read, as the two sides have different initial values.

/// Scripts, each with a description.
pub(super) const SCRIPTS: [(&str, &str); 22] = [
    (
        "the usual loop over all queues",
        r#"for file in $T/sys/class/net/replay/queues/rx-*/rps_cpus; do echo 1 > $file; done
        for file in $T/sys/class/net/*/queues/rx-*/rps_flow_cnt; do echo 1000 > "$file"; done
        grep . $T/sys/class/net/replay/queues/rx-*/rps_*"#,
    ),
    (
        "one at a time",
        "cd $T/sys/class/net/replay/queues
        echo 0 > rx-0/rps_cpus; echo 1 > rx-1/rps_cpus; cat rx-0/rps_cpus rx-1/rps_cpus
        echo 1 > rx-0/rps_cpus; echo 0 > rx-1/rps_cpus; cat rx-0/rps_cpus rx-1/rps_cpus",
    ),
    (
        "what is refused, in bash",
        "cd $T/sys/class/net/replay/queues/rx-0; echo 1 > rps_cpus; echo 64 > rps_flow_cnt
        for mask in zz 1,,q 111111111 ffffffff,ffffffff,ffffffff,ffffffff,ffffffff 0x1; do
            echo $mask > rps_cpus; echo $?; cat rps_cpus
        done
        for count in many 12q -1 99999999999 99999999999999999999; do
            echo $count > rps_flow_cnt; echo $?; cat rps_flow_cnt
        done",
    ),
    (
        "what is refused, in dash",
        "cd $T/sys/class/net/replay/queues/rx-0; echo 1 > rps_cpus
        dash -c 'echo zz > rps_cpus; echo $?; echo 111111111 > rps_cpus; echo $?; cat rps_cpus'",
    ),
    (
        "other tools",
        r"cd $T/sys/class/net/replay/queues; file=rx-0/rps_cpus
        echo 0 > $file; printf 1 > $file; cat $file
        echo 0 > $file; echo 1 | tee $file rx-1/rps_cpus; cat $file rx-1/rps_cpus
        echo q | tee $file; echo ${PIPESTATUS[1]}; cat $file
        echo 0 > $file; cat rx-1/rps_cpus > $file; cat $file
        echo 0 > $file; cp rx-1/rps_cpus $file; echo $?; cat $file
        cp $file /dev/stdout; dd if=$file bs=4096 status=none; cut -c1 $file; wc -c < $file
        echo 0 | dd of=$file status=none; cat $file
        echo 1 | dd of=$file conv=fsync status=none; cat $file
        echo 0 | dd of=$file conv=notrunc status=none; cat $file
        echo 1 | sh -c 'cat > '$file; cat $file; cmp $file rx-1/rps_cpus; echo $?",
    ),
    (
        "nothing is not a value",
        "cd $T/sys/class/net/replay/queues/rx-0; echo 1 > rps_cpus; echo 64 > rps_flow_cnt
        : > rps_cpus; echo $?; printf '' > rps_cpus; truncate -s 0 rps_cpus; echo $?; cat rps_cpus
        : > rps_flow_cnt; cat rps_flow_cnt; echo > rps_flow_cnt; echo $?; cat rps_flow_cnt
        echo > rps_cpus; echo $?; cat rps_cpus; touch rps_cpus; echo $?",
    ),
    (
        "appending",
        "echo 0 > $T/sys/class/net/replay/queues/rx-0/rps_cpus
        echo 10 > $T/proc/sys/net/core/$INT; echo 0 > $T/proc/sys/net/core/rps_default_mask
        cd $T; for file in sys/class/net/replay/queues/rx-0/rps_cpus proc/sys/net/core/$INT \\
            proc/sys/net/core/rps_default_mask
        do
            echo 1 >> $file; echo $?; cat $file; { echo 1; echo 0; } >> $file; echo $?; cat $file
        done",
    ),
    (
        "several writes to one open file",
        "cd $T; echo 5 > proc/sys/net/core/$INT
        for file in sys/class/net/replay/queues/rx-0/rps_cpus \\
            sys/class/net/replay/queues/rx-0/rps_flow_cnt proc/sys/net/core/$INT \\
            proc/sys/net/core/rps_default_mask
        do
            { echo 0; echo 1; } > $file; echo $?; cat $file
            { echo 1; echo q; echo 0; } > $file; echo $?; cat $file
        done",
    ),
    (
        "reading in pieces",
        "cd $T; echo 4096 > sys/class/net/replay/queues/rx-0/rps_flow_cnt
        echo 4321 > proc/sys/net/core/$INT
        for file in sys/class/net/replay/queues/rx-0/rps_flow_cnt proc/sys/net/core/$INT \\
            sys/devices/system/cpu/possible
        do
            dd if=$file bs=1 status=none; echo; dd if=$file bs=1 skip=1 status=none; echo
            head -c 2 $file; tail -c 2 $file; tail -n 1 $file; read line < $file; echo $line
            dash -c 'read line < $0; echo $line' $file; echo $(<$file); mapfile -t lines < $file
            echo ${#lines[@]} $lines; { head -c 1; cat; } < $file; wc -c $file; sort $file
        done",
    ),
    (
        "knobs of the device",
        "cd $T/sys/class/net/replay
        for value in 1400 67 65536 -1 0x5dc; do echo $value > mtu; echo $?; cat mtu; done
        for value in 20000 ns 0; do echo $value > gro_flush_timeout; cat gro_flush_timeout; done
        for value in 9 -1 2147483648 0; do
            echo $value > napi_defer_hard_irqs; echo $?; cat napi_defer_hard_irqs
        done",
    ),
    (
        "numbers of procfs",
        "cd $T/proc/sys/net/core
        for value in 300 '300 400' '  7' 8q q '' 0x10 017 99999999999 ' '; do
            echo $value > $INT; echo $?; cat $INT
        done; printf '42' > $INT; cat $INT; printf '4\\0002' > $INT; cat $INT
        printf '1\\n2\\n' > $INT; cat $INT",
    ),
    (
        "what sysctl does",
        "cd $T/proc/sys; echo 128 > net/core/$INT; echo 1 > net/core/rps_default_mask
        for name in net.core.$INT net.core.rps_default_mask net.core.nothing; do
            printf '%s = ' $name; cat ${name//.//}
        done",
    ),
    (
        "long writes",
        r"cd $T; echo 0 > sys/class/net/replay/queues/rx-0/rps_cpus
        for file in sys/class/net/replay/queues/rx-0/rps_cpus proc/sys/net/core/rps_default_mask \
            proc/sys/net/core/$INT
        do
            echo 1 > $file; printf '%5000s\n' 0 > $file; echo $?; cat $file
            echo 1 > $file; printf '%-5000s\n' 0 > $file; echo $?; cat $file
            echo 1 > $file; printf '%4095s\n' 0 > $file; echo $?; cat $file
            echo 1 > $file; printf '%4095s' 0 > $file; echo $?; cat $file
        done",
    ),
    (
        "what is only read",
        "cd $T; for file in sys/devices/system/cpu/online sys/devices/system/cpu/possible \\
            proc/net/softnet_stat
        do
            echo 1 > $file; echo $?; echo 1 >> $file; echo $?; : > $file; echo $?
            dash -c 'echo 1 > '$file; echo $?; echo 1 | tee $file; echo ${PIPESTATUS[1]}
        done; cat sys/devices/system/cpu/online sys/devices/system/cpu/possible",
    ),
    (
        "softnet_stat, as monitors read it",
        r#"cd $T/proc/net; wc -l < softnet_stat
        awk '{ print NF, length($0), $4, $5, $6, $7, $8, $9, $13 }' softnet_stat
        while read -r processed dropped squeezed rest; do
            printf '%s %s %s\n' ${#processed} ${#dropped} ${#squeezed}
        done < softnet_stat
        grep -cE '^([0-9a-f]{8} ){14}[0-9a-f]{8}$' softnet_stat"#,
    ),
    (
        "modes, sizes and links",
        "cd $T; stat -c '%A %s %b %o %F %U %G %n' sys sys/class sys/class/net/replay/queues/rx-0 \\
            sys/class/net/replay/queues/rx-0/* sys/class/net/replay/mtu proc/sys/net/core \\
            proc/sys/net/core/$INT proc/net/softnet_stat sys/devices/system/cpu/online
        stat -c '%h %n' sys/class/net/replay/queues/rx-0 proc/sys/net/core proc/sys/net/core/$INT
        ls sys/class/net/replay/queues/rx-0; find sys/class/net/replay/queues/rx-* | sort
        find sys/class/net/replay/queues/rx-0 -type f -name 'rps_*' -writable | sort; du -s sys/class/net/replay/queues/rx-0
        [ -w sys/class/net/replay/mtu ]; echo $?; [ -e sys/class/net/replay/nothing ]; echo $?
        [ -s proc/sys/net/core/$INT ]; echo $?; ls sys/class/net/replay/nothing; cat sys/class",
    ),
    (
        "nothing is made or removed in sysfs",
        "cd $T/sys/class/net/replay/queues/rx-0; echo 1 > rps_cpus
        echo 1 > new; touch new; mkdir new; mkfifo new; ln -s rps_cpus new; ln rps_cpus new
        mv rps_cpus new; rm -f rps_cpus; rmdir ../rx-1; cp rps_cpus new
        sed -i s/1/0/ rps_cpus 2>&1 | grep -c 'Permission denied'
        echo 1 > rps_cpus/new; cd rps_cpus; echo 1 > .; cat rps_cpus",
    ),
    (
        "nothing is made or removed in procfs",
        "cd $T/proc/sys/net/core; echo 9 > $INT
        echo 1 > new; touch new; mkdir new; mkfifo new; ln -s $INT new; ln $INT new; mv $INT new
        rm -f $INT; cp $INT new; echo 1 > $INT/new; chmod 600 $INT; chown 1 $INT; cat $INT",
    ),
    (
        "python",
        r"python3 - <<'END'
import os, shutil
T, INT = os.environ['T'], os.environ['INT']
rps_cpus = T + '/sys/class/net/replay/queues/rx-0/rps_cpus'
number = T + '/proc/sys/net/core/' + INT
for path, value in (rps_cpus, '1'), (number, '11'):
    open(path, 'w').write(value)
    print(repr(open(path).read()), repr(open(path, 'rb', buffering=0).read()))
    with open(path, 'w') as file: print(file.write('0\n'))
    with open(path, 'r+') as file:
        print(repr(file.read()), file.seek(0), file.write('1\n'), file.flush(), file.seek(0), repr(file.read()))
    with open(path) as file:
        before = file.read()
        open(path, 'w').write('0')
        print(repr(before), repr(file.read()), file.seek(0), repr(file.read()))
    with open(path, 'a') as file: file.write('1')
    print(repr(open(path).read()), os.stat(path).st_size, os.access(path, os.W_OK))
    for bad in ('zz', '\x00', '\xff'):
        try: open(path, 'w').write(bad)
        except OSError as error: print(error)
    file = os.open(path, os.O_RDWR)
    print(os.pwrite(file, b'0\n', 0), os.pread(file, 1, 0), os.pread(file, 9, 1), os.pread(file, 9, 5))
    print(os.pwrite(file, b'1\n', 7), os.pread(file, 9, 0), os.write(file, b''), os.ftruncate(file, 9))
    print(os.fstat(file).st_size, os.lseek(file, 0, os.SEEK_END), os.isatty(file))
    os.close(file)
for call in (lambda: os.open(rps_cpus, os.O_CREAT | os.O_EXCL), lambda: os.listdir(rps_cpus),
             lambda: os.rename(rps_cpus, rps_cpus + 'x'), lambda: os.open(rps_cpus, os.O_DIRECTORY)):
    try: call()
    except OSError as error: print(error)
END",
    ),
    (
        "a value that changes while it is open",
        "cd $T/sys/class/net/replay/queues/rx-0; echo 128 > rps_flow_cnt; exec 3< rps_flow_cnt
        dd bs=1 count=1 status=none <&3; echo 999 > rps_flow_cnt; cat <&3; cat rps_flow_cnt",
    ),
    (
        "many at once",
        "cd $T; for n in 1 2 3 4 5 6 7 8; do
            (for m in 1 2 3 4 5; do echo $n > proc/sys/net/core/$INT; cat proc/sys/net/core/$INT; done) &
        done | grep -cE '^[1-8]$'; wait",
    ),
    (
        "copies",
        "cd $T; echo 1 > sys/class/net/replay/queues/rx-0/rps_cpus; copy=$(mktemp -d)
        cp sys/class/net/replay/queues/rx-0/rps_cpus $copy/rps_cpus; cat $copy/rps_cpus
        cp -r sys/class/net/replay/queues/rx-0 $copy/rx-0; find $copy/rx-0 -type f | wc -l
        echo 0 > $copy/rps_cpus; cp $copy/rps_cpus sys/class/net/replay/queues/rx-0/rps_cpus
        cat sys/class/net/replay/queues/rx-0/rps_cpus
        install -m 644 $copy/rps_cpus $copy/again; cat $copy/again; rm -r $copy",
    ),
];

/// Attempts by a user other than root, and their effects.
pub(super) const STRANGERS: [(&str, &str); 4] = [
    (
        "reading",
        "cd $T; echo 1 > sys/class/net/replay/queues/rx-0/rps_cpus
        setpriv --reuid 65534 --regid 65534 --clear-groups bash -c '
            cat sys/class/net/replay/queues/rx-0/rps_cpus; cat sys/devices/system/cpu/possible
            awk \"{ print NF }\" proc/net/softnet_stat; ls sys/class/net/replay/queues/rx-0
            [ -r proc/sys/net/core/$INT ]; echo $?; [ -w proc/sys/net/core/$INT ]; echo $?'",
    ),
    (
        "writing",
        "cd $T; files=\"sys/class/net/replay/queues/rx-0/rps_cpus sys/class/net/replay/mtu
            proc/sys/net/core/$INT proc/sys/net/core/rps_default_mask proc/net/softnet_stat
            sys/devices/system/cpu/online\"
        echo 1 > sys/class/net/replay/queues/rx-0/rps_cpus; echo 1400 > sys/class/net/replay/mtu
        echo 7 > proc/sys/net/core/$INT; echo 1 > proc/sys/net/core/rps_default_mask
        setpriv --reuid 65534 --clear-groups bash -c 'for file in $1; do
            echo 0 > $file; echo 0 >> $file; : > $file; truncate -s 0 $file; echo 0 | tee $file
            chmod 666 $file; chown 65534 $file; touch $file; touch -d yesterday $file; rm -f $file
            dd if=/dev/null of=$file status=none; cp $file $file
            python3 -c \"import os, sys; os.open(sys.argv[1], os.O_RDWR)\" $file 2>&1 | tail -n 1
        done' bash \"$files\"
        cat ${files/proc?net?softnet_stat/}; stat -c '%A %U' $files",
    ),
    (
        "making and removing",
        "cd $T/sys/class/net/replay/queues; echo 1 > rx-0/rps_cpus
        setpriv --reuid 65534 --clear-groups bash -c 'cd rx-0
            echo 0 > new; mkdir new; mkfifo new; ln rps_cpus new; ln -s rps_cpus new
            mv rps_cpus new; cp rps_cpus new; rmdir ../rx-1; rm -fr ../rx-1 2>&1 | sort; cd ..; mv rx-0 rx-1
            sed -i s/1/0/ rx-0/rps_cpus 2>&1 | grep -c \"Permission denied\"'
        cat rx-0/rps_cpus; ls rx-0 rx-1",
    ),
    (
        "with the group only, and with no capabilities",
        "cd $T/sys/class/net/replay/queues/rx-0; echo 1 > rps_cpus
        setpriv --reuid 65534 --regid 0 --clear-groups bash -c 'echo 0 > rps_cpus; cat rps_cpus'
        setpriv --reuid 65534 --groups 0 --regid 65534 bash -c 'echo 0 > rps_cpus; cat rps_cpus'
        mkdir ../rx-7; cat rps_cpus",
    ),
];
